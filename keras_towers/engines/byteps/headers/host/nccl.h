// The part of NCCL's interface that BytePS calls, for communicators of one rank.
// BytePS then creates communicators and groups, but calls no collective.
#ifndef KERAS_TOWERS_HOST_NCCL_H_
#define KERAS_TOWERS_HOST_NCCL_H_

#include "cuda_runtime.h"

#define NCCL_UNIQUE_ID_BYTES 128

struct ncclComm;
typedef ncclComm *ncclComm_t;

struct ncclUniqueId {
  char internal[NCCL_UNIQUE_ID_BYTES];
};

enum ncclResult_t { ncclSuccess = 0, ncclInvalidUsage = 5 };
enum ncclRedOp_t { ncclSum = 0 };
enum ncclDataType_t {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
};

inline const char *ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess
             ? "no error"
             : "this build of BytePS is for machines without GPUs, where "
               "BYTEPS_LOCAL_SIZE has to be 1";
}
inline ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  *id = ncclUniqueId();
  return ncclSuccess;
}
inline ncclResult_t ncclCommInitRank(ncclComm_t *communicator, int ranks,
                                     ncclUniqueId, int) {
  *communicator = nullptr;
  return ranks == 1 ? ncclSuccess : ncclInvalidUsage;
}
inline ncclResult_t ncclGroupStart() { return ncclSuccess; }
inline ncclResult_t ncclGroupEnd() { return ncclSuccess; }

inline ncclResult_t ncclReduce(const void *, void *, size_t, ncclDataType_t,
                               ncclRedOp_t, int, ncclComm_t, cudaStream_t) {
  return ncclInvalidUsage;
}
inline ncclResult_t ncclReduceScatter(const void *, void *, size_t,
                                      ncclDataType_t, ncclRedOp_t, ncclComm_t,
                                      cudaStream_t) {
  return ncclInvalidUsage;
}
inline ncclResult_t ncclAllGather(const void *, void *, size_t, ncclDataType_t,
                                  ncclComm_t, cudaStream_t) {
  return ncclInvalidUsage;
}
inline ncclResult_t ncclBroadcast(const void *, void *, size_t, ncclDataType_t,
                                  int, ncclComm_t, cudaStream_t) {
  return ncclInvalidUsage;
}

#endif  // KERAS_TOWERS_HOST_NCCL_H_
