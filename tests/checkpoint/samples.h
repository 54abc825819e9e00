// The checkpoints of other programs in samples/ckpt-samples.tar.xz, unpacked for a test.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>

#include "tests/support/temporary_folder.h"
#include "zero/checkpoint/safetensors.h"

namespace zero {

/// Returns the folder, which is unpacked once in a process.
inline const std::filesystem::path& samples() {
  static const TemporaryFolder folder;
  static const auto path = [] {
    const std::string command = "tar -xJf '" ZERO_SOURCE
                                "/tests/checkpoint/samples/ckpt-samples.tar.xz' -C '" +
                                folder.path().string() + "'";
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
    return folder.path() / "ckpt-samples";
  }();
  return path;
}

/// Returns all tensors of a safetensors file.
inline std::map<std::string, at::Tensor> tensors_of(const std::filesystem::path& path) {
  const SafetensorsReader reader(path);
  std::map<std::string, at::Tensor> all;
  for (const auto& info : reader.tensors()) all[info.name] = reader.read(info.name);
  return all;
}

/// Returns whether two tensors have the same dtype, shape and bits.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const auto x = a.contiguous();
  const auto y = b.contiguous();
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

}  // namespace zero
