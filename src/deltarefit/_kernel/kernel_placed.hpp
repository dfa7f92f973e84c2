// Functions of the Python module that work through boxes.
#pragma once

#include <nanobind/nanobind.h>

namespace deltarefit {

void add_placed(nanobind::module_& m);

}  // namespace deltarefit
