// Included before every source file of ps-lite, BytePS's network layer.
//
// Several receiving threads in each process poll ZeroMQ for messages and never
// sleep. On a machine with few cores they take time from the model, and from
// the very threads that they wait for. With this header they sleep after each
// poll without a message, a little longer each time.
#if __has_include("ps/internal/van.h") && __has_include(<zmq.h>)
#include <zmq.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <thread>

namespace keras_towers {

// Args:
//   lock: held by the caller, and by threads that send. It is released while
//     this thread sleeps.
inline int Receive(zmq_msg_t *message, void *socket, int flags,
                   std::mutex &lock) {
  constexpr int kStepMicroseconds = 10, kMostMicroseconds = 500;
  static thread_local int pause = 0;
  int size = zmq_msg_recv(message, socket, flags);
  if (size != -1 || errno != EAGAIN) {
    pause = 0;
    return size;
  }
  lock.unlock();
  pause = std::min(pause + kStepMicroseconds, kMostMicroseconds);
  std::this_thread::sleep_for(std::chrono::microseconds(pause));
  lock.lock();
  errno = EAGAIN;
  return -1;
}

}  // namespace keras_towers

#define zmq_msg_recv(message, socket, flags) \
  keras_towers::Receive(message, socket, flags, mu_)
#endif
