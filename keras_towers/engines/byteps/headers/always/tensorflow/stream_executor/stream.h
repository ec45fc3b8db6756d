// A header that byteps/tensorflow/ops.h includes and TensorFlow has moved, with
// the names that ops.cc uses and TensorFlow has renamed since.
#ifndef KERAS_TOWERS_STREAM_EXECUTOR_STREAM_H_
#define KERAS_TOWERS_STREAM_EXECUTOR_STREAM_H_

// Before its names are replaced below.
#include "byteps/common/operations.h"
#include "xla/stream_executor/stream.h"

// ops.cc says ::tensorflow::Status::OK(). That type is absl::Status now, which
// is final and has no OK(). The rest of ops.cc is therefore compiled with
// another word in place of "Status", which means the same wherever it stands:
// in BytePS, in TensorFlow's macros, and in TensorFlow with the missing OK().
namespace tensorflow {
class BytePSStatus {
 public:
  BytePSStatus() = default;
  BytePSStatus(absl::Status status) : status_(std::move(status)) {}
  operator absl::Status() const { return status_; }
  static BytePSStatus OK() { return BytePSStatus(); }

 private:
  absl::Status status_;
};
}  // namespace tensorflow

namespace absl {
using BytePSStatus = Status;
}
namespace byteps {
namespace common {
using BytePSStatus = Status;
}
}  // namespace byteps

// An event that has happened once it is recorded, because recording waits for
// the stream.
namespace perftools {
namespace gputools {
class Event {
 public:
  enum class BytePSStatus { kPending, kComplete };

  template <class Executor>
  explicit Event(Executor *) {}
  bool Init() { return true; }
  BytePSStatus PollForStatus() const { return BytePSStatus::kComplete; }
};
}  // namespace gputools
}  // namespace perftools
#define ThenRecordEvent(event) BlockHostUntilDone().IgnoreError()

#define Status BytePSStatus
#define tensorflow_gpu_device_info tensorflow_accelerator_device_info

// What BytePS does with a tensor in host memory leaves the operation's output
// unset and overwrites its input. Without GPUs every tensor therefore goes the
// way of one on GPU 0, whose memory is the host's.
#ifdef KERAS_TOWERS_HOST_CUDA_RUNTIME_H_
#undef CPU_DEVICE_ID
#define CPU_DEVICE_ID 0
#endif

#endif  // KERAS_TOWERS_STREAM_EXECUTOR_STREAM_H_
