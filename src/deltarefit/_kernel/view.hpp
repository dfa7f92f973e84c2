// Arrays of any strides: shape checks and collapsing (view.cpp), sequential and scattered access (access.hpp).
#pragma once

#include "types.hpp"

namespace deltarefit {

constexpr u32 kMaxDims = 64;

// `size` and `stride` (bytes) of the dimensions that are left after collapsing; none for a single element.
struct View {
  u8* data = nullptr;
  u32 width = 0;
  u32 dims = 0;
  u64 size[kMaxDims];
  i64 stride[kMaxDims];
  u64 numel = 0;

  // Elements lie one behind the other: element i is at data + i * width.
  DR_INLINE bool contiguous() const { return dims == 0 || (dims == 1 && stride[0] == i64(width)); }
};

// Merge dimensions that step together in both views (of one shape): fewer, longer rows.
Status collapse(View& view);
Status collapse_pair(View& a, View& b);

}  // namespace deltarefit
