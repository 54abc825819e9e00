#include <ATen/core/dispatch/Dispatcher.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/device/plugin.h"

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

// On a machine with a GPU the first, on others one of the rest.
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
  if (!loaded) {
    EXPECT_THAT(message, AnyOf(HasSubstr("libtorch_cuda.so"), HasSubstr("libzero_cuda.so:")));
  }
}

}  // namespace
}  // namespace zero
