#pragma once
#include "absl/types/span.h"
namespace llvm {
template <typename T> using ArrayRef = absl::Span<const T>;
}
