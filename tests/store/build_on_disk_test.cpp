// Building a model in a file.
#include "zero/store/build_on_disk.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/engine/engine.h"

namespace {

// Says whether the next write to a disk fails; the system's call cannot be told otherwise.
std::atomic<bool> writes_fail{false};

}  // namespace

extern "C" int sync_file_range(int file, off64_t offset, off64_t bytes, unsigned int flags) {
  static const auto real =
      reinterpret_cast<decltype(&sync_file_range)>(dlsym(RTLD_NEXT, "sync_file_range"));
  if (!writes_fail.exchange(false)) return real(file, offset, bytes, flags);
  errno = EIO;
  return -1;
}

namespace zero {
namespace {

// Bytes of this process's memory that no file backs.
int64_t anonymous_bytes() {
  std::ifstream lines("/proc/self/status");
  std::string name;
  while (lines >> name) {
    int64_t kib = 0;
    if (name == "RssAnon:" && lines >> kib) return kib << 10;
    std::getline(lines, name);
  }
  return 0;
}

std::shared_ptr<torch::nn::SequentialImpl> model(int64_t layers) {
  torch::manual_seed(7);
  auto net = std::make_shared<torch::nn::SequentialImpl>();
  for (int64_t i = 0; i < layers; ++i) {
    torch::nn::Linear layer(1024, 2048);
    torch::nn::init::xavier_normal_(layer->weight);  // a second time, as initialisers do
    net->push_back(layer);
  }
  return net;
}

TEST(BuildOnDisk, BuildsTheSameModelWithoutItsMemory) {
  const TemporaryFolder folder;
  const auto expected = model(3);
  std::shared_ptr<torch::nn::SequentialImpl> built;
  {
    const BuildOnDisk scope(folder.path().string());
    built = model(3);
  }
  for (size_t i = 0; i < expected->parameters().size(); ++i)
    EXPECT_TRUE(torch::equal(built->parameters()[i], expected->parameters()[i]));
  built.reset();

  install_host_allocator();
  HostAllocator::instance().trim();
  const auto before = HostAllocator::instance().usage().used.current;
  const auto anonymous = anonymous_bytes();
  {
    const BuildOnDisk scope(folder.path().string());
    built = model(16);  // 128 MiB
  }
  EXPECT_LT(HostAllocator::instance().usage().used.current - before, 1 << 20);
  EXPECT_LT(anonymous_bytes() - anonymous, 32 << 20);
  // A tensor made after the scope is in memory again, and so is a copy of one that the scope made.
  const auto copy = built->parameters()[0].clone();
  EXPECT_GT(HostAllocator::instance().usage().used.current - before, copy.nbytes() - 1);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "the file has a name";
}

TEST(BuildOnDisk, GivesTheDiskBackWithTheTensors) {
  const TemporaryFolder folder;
  // The bytes of the file, which has no name.
  const auto disk_bytes = [&] {
    int64_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code error;
      const auto target = std::filesystem::read_symlink(entry.path(), error).string();
      struct stat file {};
      if (target.starts_with(folder.path().string()) && stat(entry.path().c_str(), &file) == 0)
        bytes += static_cast<int64_t>(file.st_blocks) * 512;
    }
    return bytes;
  };
  at::Tensor kept;
  {
    const BuildOnDisk scope(folder.path().string());
    const auto large = torch::ones({256 << 20}, torch::kByte);
    kept = torch::ones({1 << 20}, torch::kByte);
    EXPECT_GE(disk_bytes(), (256 << 20) + (1 << 20));
  }
  EXPECT_LE(disk_bytes(), 2 << 20);
  EXPECT_EQ(kept.sum().item<int64_t>(), 1 << 20);
  kept = at::Tensor();
  EXPECT_EQ(disk_bytes(), 0);
}

TEST(BuildOnDisk, WorksOnTmpfs) {
  at::Tensor tensor;
  {
    const BuildOnDisk scope("/dev/shm");
    tensor = torch::ones({1 << 20});
  }
  EXPECT_EQ(tensor.sum().item<float>(), 1 << 20);
}

TEST(BuildOnDisk, ALargerModelThanTheDiskIsRefusedByName) {
  const TemporaryFolder folder;
  const BuildOnDisk scope(folder.path().string());
  try {
    torch::empty({int64_t{1} << 50}, torch::kByte);
    FAIL() << "nothing was thrown";
  } catch (const StoreError& error) {
    const std::string says = error.what();
    EXPECT_NE(says.find("Cannot reserve 1.00 PiB"), std::string::npos) << says;
    EXPECT_NE(says.find(folder.path().string()), std::string::npos) << says;
    EXPECT_NE(says.find("The disk has"), std::string::npos) << says;
  }
  EXPECT_EQ(torch::ones({1 << 20}).sum().item<float>(), 1 << 20);
}

TEST(BuildOnDisk, NestsAndEndsWithAnException) {
  const TemporaryFolder folder;
  const BuildOnDisk outer(folder.path().string());
  try {
    const BuildOnDisk inner(folder.path().string());
    const auto tensor = torch::ones({1 << 20});
    throw std::runtime_error("a constructor failed");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(torch::ones({1 << 20}).sum().item<float>(), 1 << 20);
}

// A disk that cannot write tells so once.
class FailingWrites {
 public:
  FailingWrites() { writes_fail = true; }
  FailingWrites(const FailingWrites&) = delete;
  FailingWrites& operator=(const FailingWrites&) = delete;
  ~FailingWrites() { writes_fail = false; }
};

void expect_incomplete(const TemporaryFolder& folder, const std::function<void()>& action) {
  try {
    action();
    FAIL() << "nothing was thrown";
  } catch (const StoreError& error) {
    const std::string says = error.what();
    EXPECT_NE(says.find(folder.path().string() + " is incomplete"), std::string::npos) << says;
    EXPECT_NE(says.find("Input/output error"), std::string::npos) << says;
    EXPECT_NE(says.find("Name a folder on another"), std::string::npos) << says;
  }
}

TEST(BuildOnDisk, AWriteThatIsLostEndsTheBuild) {
  const TemporaryFolder folder;
  const BuildOnDisk scope(folder.path().string());
  std::vector<at::Tensor> made{torch::ones({1 << 16}), torch::ones({1 << 16})};
  {
    const FailingWrites disk;
    made.push_back(torch::ones({1 << 16}));  // has the first one written out
  }
  EXPECT_FALSE(writes_fail);
  for (int again = 0; again < 2; ++again) expect_incomplete(folder, [] { torch::ones({1 << 16}); });
}

TEST(BuildOnDisk, AnEngineRefusesAModelOfWhichAPartIsLost) {
  for (const int stage : {0, 1, 3}) {
    const TemporaryFolder folder;
    std::shared_ptr<torch::nn::SequentialImpl> built;
    {
      const BuildOnDisk scope(folder.path().string());
      built = model(1);
    }
    Config config;
    config.stage = stage;
    const FailingWrites disk;
    expect_incomplete(folder, [&] { Engine(built, AdamW{}, config); });
  }
}

TEST(BuildOnDisk, AFolderThatCannotBeUsedIsNamed) {
  try {
    const BuildOnDisk scope("/nowhere/at/all");
    FAIL() << "nothing was thrown";
  } catch (const StoreError& error) {
    EXPECT_NE(std::string(error.what()).find("/nowhere/at/all"), std::string::npos);
  }
}

}  // namespace
}  // namespace zero
