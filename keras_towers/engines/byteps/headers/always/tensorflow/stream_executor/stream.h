// Replaces a header that byteps/tensorflow/ops.h includes and that TensorFlow has
// moved, and defines names that ops.cc uses and that TensorFlow has renamed.
#ifndef KERAS_TOWERS_STREAM_EXECUTOR_STREAM_H_
#define KERAS_TOWERS_STREAM_EXECUTOR_STREAM_H_

// Included before names are replaced below.
#include "byteps/common/operations.h"
#include "xla/stream_executor/stream.h"

// ops.cc uses ::tensorflow::Status::OK(), but that type is an alias of
// absl::Status, which is final and has no OK(). So the rest of ops.cc is compiled
// with another name in place of "Status", defined in each namespace: for BytePS,
// for TensorFlow's macros, and for TensorFlow with the missing OK().
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

// For a tensor in host memory, BytePS leaves the operation's output unset and
// overwrites its input. So without GPUs every tensor is treated as if it were on
// GPU 0, whose memory is the host's.
#ifdef KERAS_TOWERS_HOST_CUDA_RUNTIME_H_
#undef CPU_DEVICE_ID
#define CPU_DEVICE_ID 0
#endif

#endif  // KERAS_TOWERS_STREAM_EXECUTOR_STREAM_H_
