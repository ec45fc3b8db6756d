#include "absl/status/statusor.h"
#if __has_include("xla/hlo/builder/xla_builder.h")
#include "xla/hlo/builder/xla_builder.h"
#else
#include "xla/client/xla_builder.h"
#endif
#if HAVE_GPU
namespace xla {
using absl::StatusOr;
}
#endif
