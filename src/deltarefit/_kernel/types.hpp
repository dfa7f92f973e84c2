// Plain types of the kernel: integers, errors, records, lanes. No Python, no exceptions, no containers.
//
// Code that is compiled once per instruction level (level.inl) may use only this kind of header: a template of the
// standard library that is instantiated there could be merged by the linker with the portable build's copy.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deltarefit {

// For small functions that every level shares: one body, merged by the linker, could hold another level's instructions.
#define DR_INLINE inline __attribute__((always_inline))

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

// Format limits (docs/format.md §2, §4.6).
constexpr u64 kMaxElements = u64(1) << 48;
constexpr u64 kMaxPieceBytes = u64(1) << 30;

// Result of a call: what is wrong, and the two numbers that disagree when there are two.
struct Status {
  enum Kind : int { kOk, kWrong, kMemory };
  Kind kind = kOk;
  const char* what = nullptr;
  bool numbers = false;
  u64 expected = 0;
  u64 found = 0;

  DR_INLINE bool ok() const { return kind == kOk; }
};

DR_INLINE Status wrong(const char* what) { return Status{Status::kWrong, what, false, 0, 0}; }
DR_INLINE Status wrong(const char* what, u64 expected, u64 found) {
  return Status{Status::kWrong, what, true, expected, found};
}
DR_INLINE Status no_memory() { return Status{Status::kMemory, "out of memory", false, 0, 0}; }

#define DR_TRY(expression)                                  \
  do {                                                      \
    const ::deltarefit::Status status_ = (expression);      \
    if (__builtin_expect(!status_.ok(), 0)) return status_; \
  } while (0)

struct Lanes {
  u64 lane0 = 0;
  u64 lane1 = 0;
};

DR_INLINE Lanes operator+(Lanes a, Lanes b) { return Lanes{a.lane0 + b.lane0, a.lane1 + b.lane1}; }

enum Kind : u32 { kGaps = 0, kRuns = 1, kAll = 2 };
enum Operation : u32 { kXor = 0, kAdd = 1, kSet = 2 };
enum Packing : u32 { kPlanes = 0, kTwoBit = 1 };

// Columns 10-13 of the table (docs/format.md §4.1): how a piece's own elements lie in its tensor. All zero, flat: one
// behind the other, and the piece's positions are the tensor's.
struct Rows {
  u64 offset = 0, run = 0, step = 0, pitch = 0;

  DR_INLINE bool flat() const { return run == 0; }
  // Position in the tensor of element p of the piece.
  DR_INLINE u64 position(u64 p) const { return flat() ? p : offset + p / run * pitch + p % run * step; }
};

// Columns 1-13.
struct Record {
  u64 start = 0, length = 0, count = 0, code = 0, runs = 0, gap_chain = 0, run_chain = 0, value_chain = 0, escapes = 0;
  Rows rows;

  // The first position in the tensor that the delta covers, and how many lie from there to the last one.
  DR_INLINE u64 low() const { return rows.position(start); }
  DR_INLINE u64 span() const { return rows.position(start + length - 1) - low() + 1; }
};

// Where an array's elements lie: its element 0 is element `start` of a piece of a tensor with digest key `key`.
struct Place {
  u64 start = 0;
  Rows rows;
  u64 key = 0;
};

// The code column, taken apart.
struct Code {
  u32 kind = 0, gap_planes = 0, run_planes = 0, operation = 0, packing = 0, value_planes = 0, log_width = 0;

  DR_INLINE u32 width() const { return 1u << log_width; }

  static DR_INLINE Code unpack(u64 bits) {
    return Code{u32(bits & 3),       u32(bits >> 2 & 15),  u32(bits >> 6 & 15), u32(bits >> 10 & 3),
                u32(bits >> 12 & 1), u32(bits >> 13 & 15), u32(bits >> 17 & 3)};
  }
  DR_INLINE u64 pack() const {
    return u64(kind) | u64(gap_planes) << 2 | u64(run_planes) << 6 | u64(operation) << 10 | u64(packing) << 12 |
           u64(value_planes) << 13 | u64(log_width) << 17;
  }
};

constexpr u64 kCodeBits = 19;

// One piece of a delta: where it goes and its bytes. At most 8 + 8 + 1 + 8 pieces.
enum Role : u32 { kGap, kRun, kXorValue, kAddValue, kSetValue, kEscape, kTwo };
constexpr u32 kMaxPieces = 32;

struct Piece {
  Role role;
  u32 planes;
  u32 plane;
  u64 size;
  const u8* data;
};

struct Pieces {
  u32 count = 0;
  Piece items[kMaxPieces];
};

DR_INLINE Role value_role(u32 operation) {
  return operation == kXor ? kXorValue : operation == kAdd ? kAddValue : kSetValue;
}

DR_INLINE u32 log_of_width(u32 width) { return width == 1 ? 0 : width == 2 ? 1 : width == 4 ? 2 : 3; }

}  // namespace deltarefit
