#include "memory.hpp"

#include <cstdlib>

namespace deltarefit {
namespace {

constexpr u64 kKeepBytes = u64(32) << 20;

}  // namespace

Buffer::~Buffer() { std::free(data_); }

bool Buffer::grow(u64 bytes, u64 used) {
  if (bytes <= capacity_) return true;
  // For a block that fills bit by bit, half as much again keeps the number of moves small.
  u64 wanted = used == 0 ? bytes : capacity_ + capacity_ / 2;
  if (wanted < bytes) wanted = bytes;
  if (wanted < 4096) wanted = 4096;
  if (wanted > (u64(1) << 62)) return false;
  if (used == 0) release();
  u8* moved = static_cast<u8*>(std::realloc(data_, wanted));
  if (moved == nullptr) return false;
  data_ = moved;
  capacity_ = wanted;
  return true;
}

void Buffer::release() {
  std::free(data_);
  data_ = nullptr;
  capacity_ = 0;
}

void Scratch::trim() {
  Buffer* all[] = {&gaps, &olds, &news, &work[0], &work[1], &work[2], &sample, &out};
  for (Buffer* buffer : all)
    if (buffer->capacity() > kKeepBytes) buffer->release();
}

namespace {

struct ThreadScratch {
  Scratch scratch;
  bool leased = false;
};

ThreadScratch& of_this_thread() {
  static thread_local ThreadScratch scratch;
  return scratch;
}

}  // namespace

ScratchLease::ScratchLease() : scratch_(&of_this_thread().scratch), own_(of_this_thread().leased) {
  if (own_) scratch_ = new Scratch;
  else of_this_thread().leased = true;
}

ScratchLease::~ScratchLease() {
  if (own_) {
    delete scratch_;
  } else {
    scratch_->trim();
    of_this_thread().leased = false;
  }
}

}  // namespace deltarefit
