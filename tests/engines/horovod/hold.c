// Preloaded: holds a thread before a lock that it takes in Horovod.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

static __thread int locks;
static volatile int held, released;

void hold_at_lock(int number) { locks = number; }
int is_held(void) { return held; }
void release(void) { released = 1; }

int pthread_mutex_lock(pthread_mutex_t *mutex) {
  static int (*lock)(pthread_mutex_t *);
  Dl_info caller;
  if (!lock) lock = dlsym(RTLD_NEXT, "pthread_mutex_lock");
  if (locks && dladdr(__builtin_return_address(0), &caller) &&
      strstr(caller.dli_fname, "mpi_lib") && !--locks)
    for (held = 1; !released;) usleep(1000);
  return lock(mutex);
}
