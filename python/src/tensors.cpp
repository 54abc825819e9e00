// Functions by which Python asks about a tensor whose bytes come and go.
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "binding.h"
#include "zero/models/layers/initial_values.h"
#include "zero/paging/page.h"
#include "zero/paging/pager.h"
#include "zero/store/build_on_disk.h"

namespace zero::python {

namespace {

/// Keeps the units of paged tensors present: for code that takes raw pointers, as a compiled graph.
struct Pins {
  std::vector<paging::Pager::Pin> held;
};

std::unique_ptr<Pins> pin(const std::vector<at::Tensor>& tensors) {
  auto made = std::make_unique<Pins>();
  std::map<paging::Pager*, std::vector<int64_t>> units;
  for (const auto& tensor : tensors) {
    const auto* page = tensor.defined() ? paging::page_of(tensor) : nullptr;
    if (page == nullptr) continue;
    auto& of = units[page->pager];
    if (std::find(of.begin(), of.end(), page->unit) == of.end()) of.push_back(page->unit);
  }
  if (!units.empty()) {
    released([&] {
      for (auto& [pager, of] : units) made->held.push_back(pager->touch(of, true));
    });
  }
  return made;
}

/// zero::BuildOnDisk as a context manager.
struct OnDisk {
  std::string folder;
  std::unique_ptr<BuildOnDisk> scope = {};
};

}  // namespace

void bind_tensors(py::module_& module) {
  module.def("is_sharded", [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
           paging::page_of(tensor) != nullptr;
  });
  module.def("is_gathered", [](const at::Tensor& tensor) {
    const auto* page = paging::page_of(tensor);
    return page != nullptr && page->pager->pinned(page->unit);
  });
  module.def("absent", [](const at::Tensor& like) {
    return absent_values(like.sizes(), like.scalar_type());
  });
  py::class_<Pins>(module, "Pins").def("release", [](Pins& pins) {
    released([&] { pins.held.clear(); });
  });
  module.def("pin", &pin);
  py::class_<OnDisk>(module, "BuildOnDisk")
      .def(py::init([](std::string folder) { return OnDisk{std::move(folder)}; }))
      .def("__enter__",
           [](OnDisk& on_disk) {
             released([&] { on_disk.scope = std::make_unique<BuildOnDisk>(on_disk.folder); });
           })
      .def("__exit__", [](OnDisk& on_disk, const py::args&) { reset_released(on_disk.scope); });
}

}  // namespace zero::python
