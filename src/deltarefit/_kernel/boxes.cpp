#include "boxes.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace deltarefit {
namespace {

__extension__ typedef unsigned __int128 u128;

void set_reciprocals(Digit& digit) {
  digit.reciprocal = digit.stride == 1 ? ~u64(0) : u64((u128(1) << 64) / digit.stride);
  if (digit.stride >> 32) return;
  digit.short_shift = 63 + 32 - u64(__builtin_clzll(digit.stride));
  const u64 rounded = u64((u128(1) << digit.short_shift) / digit.stride);
  digit.short_reciprocal = std::min(rounded, ~u64(0) >> 32);
}

// The offset from the first position of a box to its last one: digits go from the innermost outwards.
Status add_digit(const i64* row, u64& reach, Digit& out) {
  if (row[0] < 1) return wrong("box without elements");
  out.size = u64(row[0]);
  if (out.size == 1) return {};
  if (row[1] < 1) return wrong("canonical stride of a box is not positive");
  out.stride = u64(row[1]);
  out.storage = u64(row[2]);
  if (out.stride <= reach) return wrong("canonical strides of a box do not nest", reach + 1, out.stride);
  u64 more;
  if (out.size > kMaxElements || __builtin_mul_overflow(out.size - 1, out.stride, &more) || more >= kMaxElements)
    return wrong("box reaches beyond the largest tensor");
  reach += more;  // both below 2^48, at most six of them
  set_reciprocals(out);
  return {};
}

// The lowest and the highest storage offset that a box can reach.
Status check_storage(i64 first, const Box& box, u64 storage_size) {
  i64 least = first, most = first;
  for (u32 d = 0; d < box.digits; ++d) {
    i64 span;
    i64& end = i64(box.digit[d].storage) < 0 ? least : most;
    if (__builtin_mul_overflow(i64(box.digit[d].size - 1), i64(box.digit[d].storage), &span) ||
        __builtin_add_overflow(end, span, &end))
      return wrong("box reaches beyond the storage");
  }
  if (least < 0) return wrong("box begins before the storage");
  if (u64(most) >= storage_size) return wrong("box reaches beyond the storage", storage_size, u64(most) + 1);
  return {};
}

bool joins(const Digit& outer, const Digit& inner) {
  return outer.stride == inner.size * inner.stride && outer.storage == inner.size * inner.storage;
}

// Leaves out digits of size 1 and joins those that step together on both sides.
void simplify(const Digit* digits, u64 n, Box& out) {
  out.digits = 0;
  for (u64 d = 0; d < n; ++d) {
    if (digits[d].size == 1) continue;
    if (out.digits != 0 && joins(out.digit[out.digits - 1], digits[d])) {
      const u64 outer = out.digit[out.digits - 1].size;
      out.digit[out.digits - 1] = digits[d];
      out.digit[out.digits - 1].size *= outer;
    } else {
      out.digit[out.digits++] = digits[d];
    }
  }
}

Status read_box(const i64* row, u64 digits, u64 storage_size, Box& out) {
  Digit all[kMaxDigits];
  u64 reach = 0;
  for (u64 d = digits; d-- > 0;) DR_TRY(add_digit(row + 2 + 3 * d, reach, all[d]));
  if (row[0] < 0 || u64(row[0]) >= kMaxElements || reach >= kMaxElements - u64(row[0]))
    return wrong("box reaches beyond the largest tensor");
  if (row[1] < 0) return wrong("box begins before the storage");
  out.low = u64(row[0]);
  out.high = out.low + reach;
  out.storage = u64(row[1]);
  simplify(all, digits, out);
  return check_storage(row[1], out, storage_size);
}

}  // namespace

Status read_boxes(const u8* rows, u64 count, u64 columns, u64 storage_size, Boxes& out) {
  if (columns < 2 || columns > 2 + 3 * kMaxDigits || columns % 3 != 2)
    return wrong("columns of a table of boxes are not 2 + 3 * digits");
  u64 bytes;
  if (__builtin_mul_overflow(count, sizeof(Box), &bytes) || !out.memory.grow(bytes, 0)) return no_memory();
  Box* boxes = out.memory.as<Box>();
  for (u64 i = 0; i < count; ++i) {
    i64 row[2 + 3 * kMaxDigits];  // a copy: nobody can change it between a check and its use
    std::memcpy(row, rows + i * columns * sizeof(i64), columns * sizeof(i64));
    DR_TRY(read_box(row, columns / 3, storage_size, *new (boxes + i) Box));
  }
  std::sort(boxes, boxes + count, [](const Box& a, const Box& b) { return a.low < b.low; });
  out.count = count;
  return {};
}

bool any_box_meets(const Boxes& boxes, u64 first, u64 last) {
  for (u64 i = 0; i < boxes.count && boxes.items()[i].low <= last; ++i)
    if (boxes.items()[i].high >= first) return true;
  return false;
}

}  // namespace deltarefit
