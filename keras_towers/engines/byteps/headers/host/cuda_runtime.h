// The part of CUDA's runtime interface that BytePS calls, for a machine without
// a GPU: device memory is host memory, and every stream is idle, because copies
// are synchronous.
#ifndef KERAS_TOWERS_HOST_CUDA_RUNTIME_H_
#define KERAS_TOWERS_HOST_CUDA_RUNTIME_H_

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
// NVIDIA's header brings these in, and BytePS relies on it.
#include <memory>
#include <string>
#include <vector>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorCudartUnloading = 4,
};

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
};

struct CUstream_st;
struct CUevent_st;
typedef CUstream_st *cudaStream_t;
typedef CUevent_st *cudaEvent_t;

enum : unsigned int {
  cudaStreamNonBlocking = 0x1,
  cudaEventBlockingSync = 0x1,
  cudaEventDisableTiming = 0x2,
  cudaHostRegisterDefault = 0x0,
  cudaHostRegisterMapped = 0x2,
};

inline const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "there is no CUDA in this build";
}

// Devices and streams.
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetStreamPriorityRange(int *least,
                                                    int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = 0;
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned,
                                                int) {
  *stream = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

// Events.
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  *event = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

// Memory.
inline cudaError_t cudaHostRegister(void *, size_t, unsigned) {
  return cudaSuccess;
}
inline cudaError_t cudaHostUnregister(void *) { return cudaSuccess; }
inline cudaError_t cudaHostGetDevicePointer(void **device, void *host,
                                            unsigned) {
  *device = host;
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes,
                              cudaMemcpyKind) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes,
                                   cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}

// The workers of a machine share buffers by name, and the names are the same in
// all jobs. Without GPUs every worker counts as a separate machine: its buffers
// are private, and must not be shared with another job by accident.
#define shm_open(name, flags, mode) memfd_create(name, 0)

#endif  // KERAS_TOWERS_HOST_CUDA_RUNTIME_H_
