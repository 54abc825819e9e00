// LibTorch and its threads, and devices that LibTorch could use.
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <hwy/targets.h>
#include <torch/version.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>

#include "apps/zero/doctor_checks.h"

namespace zero::app::checkup {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLibTorch = "LibTorch";

}  // namespace

LibTorch read_libtorch(const fs::path& root) {
  LibTorch library;
  library.version = TORCH_VERSION;
  // The kernels take the best that was compiled, which is the lowest bit.
  const auto targets = hwy::SupportedAndGeneratedTargets();
  library.kernels = targets.empty() ? "none" : hwy::TargetName(targets.front());
  library.operators = at::get_cpu_capability();
  const auto flags = value_of(root / "proc/cpuinfo", "flags") + " ";
  library.avx2 = flags.find(" avx2 ") != std::string::npos;
  std::istringstream info(at::get_parallel_info());
  constexpr std::string_view kBackend = "ATen parallel backend: ";
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with(kBackend)) library.backend = line.substr(kBackend.size());
  }
  library.threads = at::get_num_threads();
  std::set<std::string> runtimes;
  std::ifstream maps(root / "proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const auto name = line.substr(line.rfind('/') + 1);
    for (const char* runtime : {"libgomp", "libiomp5", "libomp"}) {
      if (name.starts_with(std::string(runtime) + ".") ||
          name.starts_with(std::string(runtime) + "-"))
        runtimes.insert(runtime);
    }
  }
  library.runtimes.assign(runtimes.begin(), runtimes.end());
  return library;
}

Findings judge(const LibTorch& library) {
  Findings all{fine(kLibTorch, "version", library.version)};
  const auto kernels = fine(kLibTorch, "instructions",
                            fmt::format("{} in libzero's kernels, {} in LibTorch's operators",
                                        library.kernels, library.operators));
  all.push_back(library.avx2 && library.operators == "DEFAULT"
                    ? advice(kernels, "Unset ATEN_CPU_CAPABILITY.",
                             "LibTorch's operators leave this processor's AVX2 unused.")
                    : kernels);
  const auto threads = fine(
      kLibTorch, "threads",
      fmt::format(
          "{} by {}{}", library.threads,
          library.backend.empty() ? "an unknown library" : library.backend,
          library.runtimes.empty() ? "" : fmt::format(" ({})", fmt::join(library.runtimes, ", "))));
  all.push_back(library.runtimes.size() > 1
                    ? problem(threads,
                              "Load one of them only: start without LD_PRELOAD of another, and "
                              "link the program to that which LibTorch brings.",
                              "Each has its threads, so loops of the one and of the other use "
                              "twice as many as there are cores.")
                    : threads);
  return all;
}

std::vector<std::string> read_gpus(const fs::path& root) {
  std::vector<std::string> gpus;
  std::error_code ignored;
  for (const auto& device : fs::directory_iterator(root / "proc/driver/nvidia/gpus", ignored)) {
    const auto model = value_of(device.path() / "information", "Model:");
    gpus.push_back(fmt::format("{} ({})", model.empty() ? "NVIDIA" : model,
                               device.path().filename().string()));
  }
  if (gpus.empty()) {  // as in a container that hides the driver's folder
    for (const auto& device : fs::directory_iterator(root / "dev", ignored)) {
      const auto name = device.path().filename().string();
      constexpr std::string_view kDevice = "nvidia";
      if (name.starts_with(kDevice) && number(name.substr(kDevice.size())))
        gpus.push_back("/dev/" + name);
    }
  }
  std::sort(gpus.begin(), gpus.end());
  return gpus;
}

Findings judge_gpus(const std::vector<std::string>& gpus) {
  return {
      fine(kLibTorch, "GPUs",
           gpus.empty()
               ? "none"
               : fmt::format("{}: for `zero train --device cuda`, which needs the plugin for CUDA",
                             fmt::join(gpus, ", ")))};
}

}  // namespace zero::app::checkup
