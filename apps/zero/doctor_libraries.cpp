// Vector instructions, LibTorch and its threads, and devices that LibTorch could use.
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <hwy/targets.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>
#include <string_view>
#include <thread>

#include "apps/zero/doctor_checks.h"
#include "zero/models/layers/product_speed.h"

namespace zero::app::checkup {
namespace {

namespace fs = std::filesystem;

constexpr const char* kVectors = "vectors";
constexpr const char* kLibTorch = "LibTorch";

// Of both formats in turns, so that a busy moment meets both.
void measure_products(Vectors& vectors) {
  constexpr int64_t kSize = 512;
  constexpr int kRounds = 10;
  ProductSpeed fp32(at::kFloat, kSize);
  ProductSpeed bf16(at::kBFloat16, kSize);
  for (int round = 0; round < kRounds; ++round) {
    fp32.measure();
    bf16.measure();
  }
  vectors.fp32 = 1e-9 * fp32.best();
  vectors.bf16 = 1e-9 * bf16.best();
}

bool has(const std::vector<std::string>& sets, std::string_view name) {
  return std::find(sets.begin(), sets.end(), name) != sets.end();
}

}  // namespace

Vectors read_vectors(const fs::path& root) {
  constexpr std::array<const char*, 12> kMatter{
      "sse4_2",      "avx2",        "fma",         "f16c",     "avx512f",  "avx512bw",
      "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd"};
  Vectors vectors;
  const auto processors = root / "proc/cpuinfo";
  vectors.processor = value_of(processors, "model name");
  auto flags = value_of(processors, "flags");
  if (flags.empty()) flags = value_of(processors, "Features");  // Arm's
  std::istringstream words(flags);
  std::set<std::string> known;
  for (std::string word; words >> word;) known.insert(word);
  for (const char* name : kMatter) {
    if (known.contains(name)) vectors.sets.emplace_back(name);
  }
  // The kernels take the best that was compiled, which is the lowest bit.
  const auto targets = hwy::SupportedAndGeneratedTargets();
  vectors.kernels = targets.empty() ? "none" : hwy::TargetName(targets.front());
  vectors.libtorch = at::get_cpu_capability();
  measure_products(vectors);
  return vectors;
}

Findings judge(const Vectors& vectors) {
  Findings all;
  const auto processor =
      fine(kVectors, "processor",
           fmt::format("{}: {}", vectors.processor.empty() ? "unknown" : vectors.processor,
                       fmt::join(vectors.sets, " ")));
  if (has(vectors.sets, "sse4_2") && !has(vectors.sets, "avx2")) {
    all.push_back(advice(
        processor,
        "Run on a processor with AVX2; in a virtual machine let it see the host's (QEMU: -cpu "
        "host).",
        fmt::format("Updates and sums take vectors of 16 bytes ({}) in place of 32 or 64, which is "
                    "bound to slow down all that does not wait for memory.",
                    vectors.kernels)));
  } else {
    all.push_back(processor);
  }
  const auto kernels = fine(kVectors, "kernels",
                            fmt::format("{} in libzero's kernels, {} in LibTorch's operators",
                                        vectors.kernels, vectors.libtorch));
  if (has(vectors.sets, "avx2") && vectors.libtorch == "DEFAULT") {
    all.push_back(advice(kernels, "Unset ATEN_CPU_CAPABILITY.",
                         "LibTorch's operators leave this processor's AVX2 unused, which is bound "
                         "to slow down every layer."));
  } else {
    all.push_back(kernels);
  }
  const auto products =
      fine(kVectors, "matrix products",
           fmt::format("{:.0f} GFLOP/s in fp32, {:.0f} in bf16", vectors.fp32, vectors.bf16));
  constexpr double kNoise = 1.2;
  if (kNoise * vectors.bf16 < vectors.fp32) {
    all.push_back(advice(
        products, "Train in fp32 (zero train --dtype fp32) where the memory suffices.",
        fmt::format("Matrix products in bf16 take {:.1f} times as long as in fp32 (measured){}.",
                    vectors.fp32 / vectors.bf16,
                    has(vectors.sets, "avx512_bf16") || has(vectors.sets, "amx_bf16")
                        ? ""
                        : ": this processor has no instructions for them")));
  } else {
    all.push_back(products);
  }
  return all;
}

LibTorch read_libtorch(const fs::path& root) {
  LibTorch library;
  library.version = TORCH_VERSION;
  std::istringstream info(at::get_parallel_info());
  constexpr std::string_view kBackend = "ATen parallel backend: ";
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with(kBackend)) library.backend = line.substr(kBackend.size());
  }
  library.threads = at::get_num_threads();
  std::mutex mutex;
  std::set<std::thread::id> threads;
  at::parallel_for(0, library.threads, 1, [&](int64_t, int64_t) {
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  library.took_part = static_cast<int>(threads.size());
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
  const auto threads = fine(
      kLibTorch, "threads",
      fmt::format(
          "{} by {}{}, of which {} took part in a loop", library.threads,
          library.backend.empty() ? "an unknown library" : library.backend,
          library.runtimes.empty() ? "" : fmt::format(" ({})", fmt::join(library.runtimes, ", ")),
          library.took_part));
  if (library.runtimes.size() > 1) {
    all.push_back(problem(
        threads,
        "Load one of them only: start without LD_PRELOAD of another, and link the program to that "
        "which LibTorch brings.",
        "Each has its threads, so loops of the one and of the other use twice as many as there are "
        "cores, which is bound to slow down every step."));
  } else if (library.took_part < library.threads) {
    all.push_back(
        problem(threads,
                "Raise the limits of threads (ulimit -u, the cgroup's pids.max), and look "
                "at OMP_THREAD_LIMIT and OMP_DYNAMIC.",
                fmt::format("{} of {} threads do nothing in parallel loops (measured).",
                            library.threads - library.took_part, library.threads)));
  } else {
    all.push_back(threads);
  }
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
  const bool named = !gpus.empty();
  // Classes that begin with 03 are display controllers; a device in a container may be hidden
  // there, and stand in /dev alone.
  for (const auto& device : fs::directory_iterator(root / "sys/bus/pci/devices", ignored)) {
    if (!first_line(device.path() / "class").starts_with("0x03")) continue;
    const auto vendor = first_line(device.path() / "vendor");
    if (named && vendor == "0x10de") continue;
    gpus.push_back(fmt::format("display device {}:{} ({})", vendor,
                               first_line(device.path() / "device"),
                               device.path().filename().string()));
  }
  if (gpus.empty()) {
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
