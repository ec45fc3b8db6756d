#pragma once
#include <vector>
namespace llvm {
template <typename T> using SmallVector = std::vector<T>;
}
