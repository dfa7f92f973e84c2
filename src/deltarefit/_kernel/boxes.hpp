// Tables of strided boxes: which canonical positions a storage holds, and where (boxes.cpp checks them).
#pragma once

#include "memory.hpp"
#include "types.hpp"

namespace deltarefit {

constexpr u32 kMaxDigits = 6;

// One digit of a box: canonical positions and storage offsets go up by these strides from one value to the next.
struct Digit {
  u64 size = 1;
  u64 stride = 0;            // canonical, positive
  u64 storage = 0;           // of any sign, as two's complement
  u64 reciprocal = 0;        // 2^64 / stride, rounded down, but below 2^64
  u64 short_reciprocal = 0;  // the same of 2^short_shift, but below 2^32, for strides below 2^32
  u64 short_shift = 0;

  // Takes the digit out of `rest`. The product is too small by one at most.
  DR_INLINE u64 split(u64& rest) const {
    __extension__ typedef unsigned __int128 u128;
    u64 value = u64(u128(rest) * reciprocal >> 64);
    rest -= value * stride;
    const bool one_more = rest >= stride;
    rest -= one_more ? stride : 0;
    return value + one_more;
  }
};

// One strided rule: position low + sum of value * stride lies at offset storage + sum of value * storage stride.
// Strides descend and nest: whatever the inner digits are, they stay below one stride of the outer one.
struct Box {
  u64 low = 0, high = 0;  // first and last canonical position
  u64 storage = 0;        // offset of the first one
  u32 digits = 0;         // none of size 1; digits that step together are one
  Digit digit[kMaxDigits];

  // Every position from low to high is in the box, one storage stride apart.
  DR_INLINE bool unbroken() const { return digits == 0 || (digits == 1 && digit[0].stride == 1); }
  DR_INLINE u64 step() const { return digits == 0 ? 1 : digit[digits - 1].storage; }
};

// The boxes of a table, by ascending `low`.
struct Boxes {
  Buffer memory;
  u64 count = 0;

  DR_INLINE const Box* items() const { return memory.as<Box>(); }
};

// Checks the rows of a table and takes them over; `columns` is 2 + 3 * digits. Every offset that a box can reach is
// below `storage_size`. That boxes are disjoint is not checked: where they overlap, results are wrong.
Status read_boxes(const u8* rows, u64 count, u64 columns, u64 storage_size, Boxes& out);

// Whether any box reaches into the positions from `first` to `last`.
bool any_box_meets(const Boxes& boxes, u64 first, u64 last);

}  // namespace deltarefit
