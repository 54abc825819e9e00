#include <ATen/core/dispatch/Dispatcher.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/device/plugin.h"
#include "zero/train/device.h"

namespace zero {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

TEST(DevicePlugin, IsNotNeededForTheCpu) {
  EXPECT_NO_THROW(load_device_plugin(c10::DeviceType::CPU));
}

TEST(DevicePlugin, IsRefusedByNameForDevicesThatHaveNone) {
  EXPECT_THAT(message_of<ConfigError>([] { load_device_plugin(c10::DeviceType::XPU); }),
              HasSubstr("XPU"));
}

// A machine with a GPU has the operators. On others the message says what is missing.
TEST(DevicePlugin, OfCudaBringsItsOperatorsOrSaysWhatIsMissing) {
  std::string message;
  try {
    load_device_plugin(c10::DeviceType::CUDA);
  } catch (const ConfigError& error) {
    message = error.what();
  }
  const auto has_kernel = [](const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").hasKernelForDispatchKey(
        c10::DispatchKey::CUDA);
  };
  const bool loaded = message.empty() || message.find("finds no CUDA device") != std::string::npos;
  EXPECT_EQ(has_kernel("zero::update_"), loaded) << message;
  EXPECT_EQ(has_kernel("zero::squared_norm_"), loaded) << message;
  EXPECT_EQ(has_kernel("zero::linear_gelu"), loaded) << message;
  if (!loaded) {
    EXPECT_THAT(message, AnyOf(HasSubstr("libtorch_cuda.so"), HasSubstr("libzero_cuda.so:")));
  }
}

TEST(TrainingDevice, IsTheCpuWhereThereIsNoOther) {
  std::vector<std::string> told;
  comm::run_as_threads(2, [&](auto host) {
    const auto tell = [&](std::string_view text) { told.emplace_back(text); };
    EXPECT_EQ(train::on_training_device(host, TrainingDevice::cpu, false, tell), host);
    const auto group = train::on_training_device(host, TrainingDevice::any, false, tell);
    if (!group->device().is_cpu()) return;
    EXPECT_EQ(group, host);
    EXPECT_THAT(message_of<ConfigError>([&] {
                  (void)train::on_training_device(host, TrainingDevice::cuda, false, tell);
                }),
                HasSubstr("CUDA"));
    if (host->rank() == 0) {
      ASSERT_EQ(told.size(), 1U) << "of the free choice alone";
      EXPECT_THAT(told[0], HasSubstr("training on the CPU"));
    }
  });
}

}  // namespace
}  // namespace zero
