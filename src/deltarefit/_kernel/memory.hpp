// Growing scratch memory, one set per thread, so that a steady stream of calls allocates nothing.
#pragma once

#include "types.hpp"

namespace deltarefit {

// A block of raw memory. grow() keeps the first `used` bytes; false when there is no memory.
class Buffer {
 public:
  DR_INLINE Buffer() {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  bool grow(u64 bytes, u64 used);
  void release();
  DR_INLINE u64 capacity() const { return capacity_; }
  DR_INLINE u8* data() const { return data_; }
  template <class T>
  DR_INLINE T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  u8* data_ = nullptr;
  u64 capacity_ = 0;
};

struct Scratch {
  Buffer gaps;      // gaps of the changed positions, u32 or u64
  Buffer olds;      // their old values
  Buffer news;      // their new values
  Buffer work[3];   // derived arrays: run gaps and lengths, stored values, escapes
  Buffer sample;    // what the choice looks at
  Buffer out;       // bytes of the pieces

  // Give back what one very large call needed, so that idle threads hold little.
  void trim();
};

// The calling thread's scratch until the end of the scope. A call within a call (a finalizer that Python runs while
// results are made) gets one of its own.
class ScratchLease {
 public:
  ScratchLease();
  ScratchLease(const ScratchLease&) = delete;
  ScratchLease& operator=(const ScratchLease&) = delete;
  ~ScratchLease();

  Scratch& operator*() const { return *scratch_; }

 private:
  Scratch* scratch_;
  bool own_;
};

}  // namespace deltarefit
