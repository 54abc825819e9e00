// Files of torch.save: what is read and written, and that no file harms its reader.
#include "zero/checkpoint/pt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/checkpoint/samples.h"
#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/checkpoint/foreign/pickle.h"
#include "zero/checkpoint/foreign/pt_file.h"

namespace zero {
namespace {

namespace fs = std::filesystem;
using foreign::Pickle;
using ::testing::HasSubstr;
using Named = std::vector<std::pair<std::string, at::Tensor>>;

std::map<std::string, at::Tensor> loaded(const std::filesystem::path& path) {
  std::map<std::string, at::Tensor> all;
  for (auto& [name, tensor] : load_pt(path)) all[name] = tensor;
  return all;
}

TEST(Pt, ReadsEveryFormOfTheSameTensors) {
  const auto expected = tensors_of(samples() / "plain/plain.expected.safetensors");
  struct Form {
    const char* file;
    const char* prefix = "";
    bool half = false;
  };
  for (const auto& [file, prefix, half] :
       {Form{"plain-zip.pt"}, Form{"plain-zip-protocol4.pt"}, Form{"plain-legacy.pt"},
        Form{"plain-tar.pt"}, Form{"plain-zip-without-crc.pt"}, Form{"plain-nested.pt", "model."},
        Form{"plain-half.pt", "", true}}) {
    SCOPED_TRACE(file);
    const auto found = loaded(samples() / "plain" / file);
    EXPECT_EQ(found.size(), expected.size());
    for (const auto& [name, value] : expected) {
      ASSERT_TRUE(found.contains(prefix + name)) << name;
      const auto wanted = half && value.is_floating_point() ? value.to(at::kHalf) : value;
      EXPECT_TRUE(same_bits(found.at(prefix + name), wanted)) << name;
    }
    if (half || std::string(file) == "plain-tar.pt") continue;
    EXPECT_TRUE(found.at(prefix + std::string("emb.weight"))
                    .is_alias_of(found.at(prefix + std::string("head.weight"))));
  }
}

TEST(Pt, ReadsViewsOfOneStorage) {
  const auto found = loaded(samples() / "plain/plain-views.pt");
  const auto expected = tensors_of(samples() / "plain/plain.expected.safetensors");
  for (const auto& [name, value] : found) {
    const bool transposed = name == "fc1.transposed";
    const auto& wanted = expected.at(transposed ? "fc1.weight" : name);
    EXPECT_TRUE(same_bits(value, transposed ? wanted.t() : wanted)) << name;
    EXPECT_TRUE(value.is_alias_of(found.at("fc1.weight"))) << name;
  }
  EXPECT_EQ(found.at("fc1.transposed").stride(0), 1);
}

TEST(Pt, GivesBackWhatItWrote) {
  const TemporaryFolder folder;
  const auto flat = torch::arange(40, at::kFloat);
  Named tensors{{"view", flat.narrow(0, 3, 12).view({3, 4})},
                {"transposed", flat.narrow(0, 3, 12).view({3, 4}).t()},
                {"alone", torch::arange(24, at::kDouble).view({2, 3, 4}).transpose(0, 2)},
                {"scalar", torch::tensor(2.5)},
                {"empty", torch::empty({0, 7})},
                {"a name", torch::tensor({true, false})}};
  for (const auto dtype :
       {at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort, at::kChar, at::kByte,
        at::kComplexFloat, at::kUInt16, at::kFloat8_e4m3fn, at::kFloat8_e5m2})
    tensors.emplace_back(c10::toString(dtype), torch::arange(9, at::kFloat).to(dtype));
  save_pt(folder / "a.pt", tensors);
  const auto found = loaded(folder / "a.pt");
  ASSERT_EQ(found.size(), tensors.size());
  for (const auto& [name, value] : tensors) EXPECT_TRUE(same_bits(found.at(name), value)) << name;
  EXPECT_TRUE(found.at("view").is_alias_of(found.at("transposed")));
  tensors.push_back(tensors.front());
  EXPECT_THAT(message_of<CheckpointError>([&] { save_pt(folder / "a.pt", tensors); }),
              HasSubstr("two tensors are named 'view'"));
}

// Calls `check` with a copy of a file as it is when one byte is changed, and when it is cut off;
// with a number that says where. The copy is changed in place: writing it anew would take much
// longer.
void for_each_damage(const std::string& whole, size_t stride,
                     const std::function<void(const fs::path&, bool cut)>& check) {
  const TemporaryFolder folder;
  const auto path = folder.write("b.pt", whole);
  for (size_t i = 0; i < whole.size(); i += stride) {
    SCOPED_TRACE(i);
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    for (const int mask : {0x01, 0xFE, 0x00}) {  // and the byte as it was
      file.seekp(static_cast<std::streamoff>(i));
      file.put(static_cast<char>(whole[i] ^ mask)).flush();
      if (mask != 0) check(path, false);
    }
  }
  for (size_t size = whole.size() - 1; size > 4 * stride; size -= 4 * stride) {
    SCOPED_TRACE(size);
    fs::resize_file(path, size);
    check(path, true);
  }
}

// A change of any byte is refused or changes no tensor.
TEST(Pt, NoByteOfAFileCanChangeATensorUnnoticed) {
  const TemporaryFolder folder;
  const Named tensors{{"x", torch::arange(5, at::kFloat)}, {"y", torch::tensor({7}, at::kLong)}};
  save_pt(folder / "a.pt", tensors);
  int refused = 0;
  for_each_damage(TemporaryFolder::read(folder / "a.pt"), 1, [&](const auto& path, bool cut) {
    try {
      const auto found = loaded(path);
      EXPECT_FALSE(cut);
      for (const auto& [name, value] : tensors)
        EXPECT_TRUE(found.contains(name) && same_bits(found.at(name), value)) << name;
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), HasSubstr("b.pt"));
      ++refused;
    }
  });
  EXPECT_GT(refused, 500);
}

// A legacy file has no checksums: what is read may be wrong, but nothing else goes wrong.
TEST(Pt, AnyFileOfTheOtherFormsIsReadOrRefused) {
  for (const auto* form : {"plain-legacy.pt", "plain-tar.pt"}) {
    int refused = 0;
    for_each_damage(TemporaryFolder::read(samples() / "plain" / form), 5,
                    [&](const auto& path, bool) {
                      try {
                        load_pt(path);
                      } catch (const CheckpointError&) {
                        ++refused;
                      }
                    });
    EXPECT_GT(refused, 50) << form;
  }
}

TEST(Pickle, ReadsWhateverTheBytesOfAMetadataFileBecome) {
  const auto whole = TemporaryFolder::read(samples() / "dcp/fsdp2/.metadata");
  EXPECT_EQ(Pickle(whole).size(), whole.size());
  int refused = 0;
  for (size_t i = 0; i < whole.size(); i += 11) {
    auto bytes = whole;
    bytes[i] = static_cast<char>(bytes[i] ^ (i % 2 == 0 ? 0xFF : 1 << (i % 8)));
    try {
      const Pickle pickle(bytes);
      pickle.root().as_json();
    } catch (const CheckpointError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 100);
}

TEST(Pickle, RunsNothingAndRefusesWhatItCannotHold) {
  const TemporaryFolder folder;
  const auto marker = (folder / "made").string();
  const std::string command = "cposix\nsystem\n(S'touch " + marker + "'\ntR.";
  EXPECT_THAT(message_of<CheckpointError>([&] { Pickle{command}; }), HasSubstr("opcode 0x53"));
  std::string call = "cposix\nsystem\n(X";
  const std::string touch = "touch " + marker;
  const auto length = static_cast<uint32_t>(touch.size());
  call.append(reinterpret_cast<const char*>(&length), 4).append(touch).append("tR.");
  const Pickle harmless(call);
  EXPECT_TRUE(harmless.root().is_call("posix.system"));
  EXPECT_EQ(harmless.root().argument(0)->as_text(), touch);
  EXPECT_FALSE(std::filesystem::exists(marker));

  const std::string tail(4, '\xFF');
  for (const auto& [bytes, message] : std::vector<std::pair<std::string, std::string>>{
           {"", "1 bytes are wanted, and 0 follow"},
           {"X" + tail + "abc", "4294967295 bytes are wanted, and 3 follow"},
           {"\x8e" + tail + tail + "abc", "bytes are wanted, and 3 follow"},
           {"h\x05.", "it has put nothing into place 5"},
           {"R.", "the stack is empty"},
           {"(.", "the stack is empty"},
           {"NN.", "ends with 2 values"},
           {"}(Nu.", "a key has no value"},
           {"Na.", "the stack is empty"},
           {"NNa.", "takes none"},
           {"t.", "no mark"},
           {"I12x\n.", "'12x' is no number"},
           {"\x97.", "opcode 0x97"}}) {
    EXPECT_THAT(message_of<CheckpointError>([&text = bytes] { Pickle{text}; }), HasSubstr(message))
        << bytes;
  }
  // A list that holds itself, and one whose elements are 2 to the power 40.
  std::string laughs = "]q" + std::string(1, '\0') + "0";
  for (char level = 1; level < 40; ++level) {
    const std::string below{'h', static_cast<char>(level - 1)};
    laughs += "](" + below + below + "eq" + level + "0";
  }
  laughs += "h\x27";
  for (const auto& bytes : {std::string("]q\0h\0a.", 7), laughs + "."}) {
    const Pickle pickle(bytes);
    EXPECT_FALSE(pickle.root().as_json());
  }
}

}  // namespace
}  // namespace zero
