// This file is built in place of gloo_rail.cpp where LibTorch has no Gloo that libzero can use.
#include <fmt/format.h>
#include <torch/version.h>

#include "zero/base/error.h"
#include "zero/comm/gloo_rail.h"

namespace zero::comm {

bool has_gloo_rails() { return false; }

std::unique_ptr<Rail> gloo_rail(c10::intrusive_ptr<c10d::Store> /*store*/, int /*host*/, int hosts,
                                const std::string& /*address*/, PieceOptions /*options*/) {
  throw CommError(fmt::format(
      "The ranks are on {} hosts, and libzero was built with a LibTorch {} whose Gloo it cannot "
      "use. Build it with the LibTorch that `make setup` installs, or set ZERO_TRANSPORT to "
      "openmpi or mpich.",
      hosts, TORCH_VERSION));
}

}  // namespace zero::comm
