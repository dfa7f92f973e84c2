// Python objects to views, records and slices, and back. The only header that knows Python besides kernel.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "record.hpp"
#include "types.hpp"
#include "view.hpp"

namespace deltarefit {

namespace nb = nanobind;

// Throws what Python shall see: ValueError or MemoryError.
void raise_unless_ok(const Status& status);

// A buffer of an element array, released at the end of the scope (with the GIL held).
class ArrayArg {
 public:
  enum Access { kRead, kWrite };
  ArrayArg(nb::handle object, const char* name, Access access);
  ArrayArg(const ArrayArg&) = delete;
  ArrayArg& operator=(const ArrayArg&) = delete;
  ~ArrayArg();

  View view;  // as given: collapse before use

 private:
  Py_buffer buffer_;
};

// The slices of one delta.
class SliceArgs {
 public:
  explicit SliceArgs(nb::handle sequence);
  SliceArgs(const SliceArgs&) = delete;
  SliceArgs& operator=(const SliceArgs&) = delete;
  ~SliceArgs();

  Slice items[kMaxPieces];
  u64 count = 0;

 private:
  void release();
  Py_buffer buffers_[kMaxPieces];
};

Record record_from(nb::handle tuple);
Rows rows_from(nb::handle tuple);
nb::tuple record_to_tuple(const Record& record);
nb::tuple lanes_to_tuple(Lanes lanes);
std::string stream_name(const Piece& piece);

// A new NumPy array of `n` unsigned integers of `width` bytes, and its memory.
nb::object new_array(u64 n, u32 width, u8** data);

}  // namespace deltarefit
