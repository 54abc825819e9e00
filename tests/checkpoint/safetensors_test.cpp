#include "zero/checkpoint/safetensors.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>

#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/checkpoint/file.h"

namespace zero {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TensorInfo info(const std::string& name, const at::Tensor& tensor) {
  return {name, tensor.scalar_type(), tensor.sizes().vec()};
}

size_t entries(const std::filesystem::path& folder) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

TEST(Safetensors, RoundTripsEveryDtypeAndShapeInAnyOrder) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "model.safetensors";
  at::manual_seed(1);
  std::map<std::string, at::Tensor> tensors;
  for (const auto dtype :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    tensors[c10::toString(dtype)] = at::randn({3, 5}).to(dtype);
  }
  for (const auto dtype : {at::kLong, at::kInt, at::kShort, at::kChar, at::kByte, at::kBool,
                           at::kUInt16, at::kUInt32, at::kUInt64}) {
    tensors[c10::toString(dtype)] = at::randint(2, {7}).to(dtype);
  }
  tensors["scalar \xE2\x82\xAC \"quoted\"\n"] = at::full({}, 2.5F);
  tensors["none"] = at::empty({4, 0, 2});
  tensors["transposed"] = at::randn({4, 6}).t();
  tensors["large"] = at::randn({700, 1000});
  std::vector<TensorInfo> infos;
  for (const auto& [name, tensor] : tensors) infos.push_back(info(name, tensor));
  SafetensorsWriter writer(path, infos, {{"format", "pt"}});
  for (auto it = tensors.rbegin(); it != tensors.rend(); ++it) writer.write(it->first, it->second);
  EXPECT_FALSE(std::filesystem::exists(path)) << "not before it is complete";
  writer.commit();
  EXPECT_EQ(entries(folder.path()), 1U) << "nothing temporary is left";

  const SafetensorsReader reader(path);
  EXPECT_EQ(reader.metadata(), (std::map<std::string, std::string>{{"format", "pt"}}));
  EXPECT_EQ(reader.tensors().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    ASSERT_TRUE(reader.contains(name)) << name;
    const auto back = reader.read(name);
    EXPECT_EQ(back.scalar_type(), tensor.scalar_type());
    EXPECT_EQ(back.sizes(), tensor.sizes());
    const auto expected = tensor.contiguous();
    EXPECT_EQ(std::string(static_cast<const char*>(back.const_data_ptr()), back.nbytes()),
              std::string(static_cast<const char*>(expected.const_data_ptr()), expected.nbytes()))
        << name;
  }
}

TEST(Safetensors, ReadsRangesOfATensor) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "a.safetensors";
  const auto wide = at::arange(60).view({3, 4, 5});
  const auto narrow = at::arange(7).to(at::kBFloat16);
  const auto none = at::empty({0, 3});
  SafetensorsWriter writer(path, {info("wide", wide), info("narrow", narrow), info("none", none)});
  writer.write("wide", wide);
  writer.write("narrow", narrow);
  writer.write("none", none);
  writer.commit();
  const SafetensorsReader reader(path);
  for (const auto& [name, tensor] : {std::pair{"wide", wide}, {"narrow", narrow}, {"none", none}}) {
    EXPECT_EQ(reader.info(name), info(name, tensor));
    const auto flat = tensor.reshape({-1});
    for (int64_t begin = 0; begin <= flat.numel(); ++begin) {
      for (int64_t count = 0; begin + count <= flat.numel(); ++count)
        ASSERT_TRUE(reader.read(name, begin, count).equal(flat.narrow(0, begin, count)));
    }
  }
  for (const auto& [begin, count] :
       {std::pair<int64_t, int64_t>{-1, 2}, {5, -1}, {5, 3}, {8, 0}, {1, INT64_MAX}}) {
    const auto read = [&, &from = begin, &many = count] { reader.read("narrow", from, many); };
    EXPECT_THAT(read, ThrowsMessage<CheckpointError>(
                          AllOf(HasSubstr("a.safetensors"), HasSubstr("'narrow', which has 7"))));
  }
  EXPECT_THAT([&] { reader.read("narow", 0, 1); },
              ThrowsMessage<CheckpointError>(HasSubstr("'narrow'")));
}

TEST(Safetensors, HeaderAndTensorsAreAligned) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "a.safetensors";
  const auto narrow = at::ones({3}, at::kBFloat16);
  const auto wide = at::ones({2});
  SafetensorsWriter writer(path, {info("narrow", narrow), info("wide", wide)});
  writer.write("narrow", narrow);
  writer.write("wide", wide);
  writer.commit();
  const auto bytes = TemporaryFolder::read(path);
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  EXPECT_EQ(length % 8, 0U);
  EXPECT_EQ(bytes[8], '{');
  EXPECT_THAT(bytes.substr(8, length),
              AllOf(HasSubstr(R"("wide":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})"),
                    HasSubstr(R"("narrow":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]})")));
  EXPECT_EQ(bytes.size(), 8 + length + 14);
  EXPECT_EQ(SafetensorsReader(path).tensors().front().name, "wide");
}

TEST(Safetensors, AnEmptyFileOfTensorsIsOne) {
  const TemporaryFolder folder;
  SafetensorsWriter(folder.path() / "a", {}).commit();
  EXPECT_TRUE(SafetensorsReader(folder.path() / "a").tensors().empty());
}

TEST(Safetensors, WriterRefusesWhatDoesNotFitTheDeclaration) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "a.safetensors";
  folder.write("a.safetensors", "the old file");
  {
    SafetensorsWriter writer(path, {{"x", at::kFloat, {2}}, {"y", at::kFloat, {2}}});
    EXPECT_THROW(writer.write("z", at::ones({2})), CheckpointError);
    EXPECT_THAT([&] { writer.write("x", at::ones({3})); },
                ThrowsMessage<CheckpointError>(
                    AllOf(HasSubstr("'x'"), HasSubstr("declared as Float (2) and is Float (3)"))));
    EXPECT_THROW(writer.write("x", at::ones({2}, at::kLong)), CheckpointError);
    writer.write("x", at::ones({2}));
    EXPECT_THAT([&] { writer.write("x", at::ones({2})); },
                ThrowsMessage<CheckpointError>(HasSubstr("written already")));
    EXPECT_THAT([&] { writer.commit(); },
                ThrowsMessage<CheckpointError>(HasSubstr("'y' was not written")));
  }
  EXPECT_EQ(TemporaryFolder::read(path), "the old file");
  EXPECT_EQ(entries(folder.path()), 1U);
  const auto refuse = [&](std::vector<TensorInfo> tensors, const char* message) {
    EXPECT_THAT([&] { SafetensorsWriter(path, tensors); },
                ThrowsMessage<CheckpointError>(HasSubstr(message)));
  };
  refuse({{"x", at::kFloat, {2}}, {"x", at::kFloat, {2}}}, "two tensors are named 'x'");
  refuse({{"x", at::kComplexFloat, {2}}}, "no name for");
  refuse({{"x", at::kFloat, {-2}}}, "has the shape");
  refuse({{"__metadata__", at::kFloat, {2}}}, "__metadata__");
  refuse({{"\xFF", at::kFloat, {2}}}, "not UTF-8");
  EXPECT_EQ(entries(folder.path()), 1U);
}

TEST(Safetensors, AFolderThatIsNotThereIsAClearError) {
  EXPECT_THAT([] { SafetensorsWriter("/nowhere/a.safetensors", {}); },
              ThrowsMessage<CheckpointError>(
                  AllOf(HasSubstr("/nowhere/a.safetensors"), HasSubstr("No such file"))));
}

// A limit on the size of files stands for a full disk. The signal that the system sends where it is
// exceeded keeps its default, which kills.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limit{bytes, old_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &old_); }

 private:
  rlimit old_{};
};

TEST(Safetensors, AWriteThatFailsNamesTheFileAndLeavesNothing) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "a.safetensors";
  const FileSizeLimit limit(1 << 20);
  EXPECT_THAT(
      [&] {
        SafetensorsWriter writer(path, {{"x", at::kFloat, {1 << 19}}});
        writer.write("x", at::ones({1 << 19}));
        writer.commit();
      },
      ThrowsMessage<CheckpointError>(AllOf(HasSubstr("Cannot write " + path.string()),
                                           HasSubstr("File too large"),
                                           HasSubstr("at most 1.00 MiB"), HasSubstr("ulimit -f"))));
  EXPECT_EQ(entries(folder.path()), 0U);
}

TEST(OutputFile, ABufferedWriteThatFailsShowsAtCommit) {
  const TemporaryFolder folder;
  const FileSizeLimit limit(100);
  OutputFile file(folder.path() / "a", &fail<DataError>);
  file.write(std::string(200, 'x').data(), 200);
  EXPECT_THROW(file.commit(), DataError);
}

TEST(OutputFile, BuffersSmallPiecesAndPassesLargeOnes) {
  const TemporaryFolder folder;
  std::string expected;
  OutputFile file(folder.path() / "a", &fail<DataError>);
  for (const size_t size : {1, 1000, 1 << 20, 5, (1 << 20) + 3, 0, 700000, 700000, 9}) {
    const std::string piece(size, static_cast<char>('a' + expected.size() % 26));
    file.write(piece.data(), piece.size());
    expected += piece;
    EXPECT_EQ(file.size(), expected.size());
  }
  file.write_at(500, "patched", 7);
  expected.replace(500, 7, "patched");
  file.write("end", 3);
  file.commit();
  EXPECT_EQ(TemporaryFolder::read(folder.path() / "a"), expected + "end");
}

// A file with this header and `data` bytes after it.
std::string file_of(const std::string& header, size_t data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header +
         std::string(data, '\0');
}

TEST(Safetensors, ReaderSaysHowAFileLies) {
  const TemporaryFolder folder;
  const auto expect = [&](const std::string& contents, const char* message) {
    const auto path = folder.write("a.safetensors", contents);
    EXPECT_THAT([&] { SafetensorsReader reader(path); },
                ThrowsMessage<CheckpointError>(AllOf(HasSubstr(path.string()), HasSubstr(message))))
        << contents;
  };
  const std::string x = R"("x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  EXPECT_NO_THROW(SafetensorsReader(folder.write("good", file_of("{" + x + "}", 8))));
  EXPECT_NO_THROW(SafetensorsReader(folder.write("good", file_of("{" + x + "}   ", 8))))
      << "padding";

  expect("", "only 0 bytes");
  expect("1234567", "only 7 bytes");
  expect(std::string(8, '\xFF') + "{}",
         "promises a header of 18446744073709551615 bytes, and 2 follow");
  expect(file_of("{}", 0).substr(0, 9), "promises a header of 2 bytes, and 1 follow");
  expect(file_of("", 0), "is not JSON");
  expect(file_of("{", 0), "not JSON");
  expect(file_of("{\"\xFF\":1}", 0), "not JSON");
  expect(file_of("[]", 0), "not a JSON object");
  expect(file_of("{" + x + "," + x + "}", 8), "names 'x' twice");
  expect(file_of(R"({"x":1})", 0), "lacks a dtype");
  expect(file_of(R"({"x":{"dtype":"F32","shape":[2]}})", 8),
         "lacks a dtype, a shape or data_offsets");
  expect(file_of(R"({"x":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8),
         "names 'dtype' twice");
  expect(file_of(R"({"x":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}})", 8),
         "unknown dtype \"F33\"");
  expect(file_of(R"({"x":{"dtype":4,"shape":[2],"data_offsets":[0,8]}})", 8), "unknown dtype 4");
  expect(file_of(R"({"x":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8),
         "has the shape [-2]");
  expect(file_of(R"({"x":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8),
         "has the shape [2.0]");
  expect(file_of(R"({"x":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", 8), "has the shape 2");
  expect(
      file_of(R"({"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0),
      "too large");
  expect(file_of(R"({"x":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,0]}})", 0),
         "too large");
  expect(file_of(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4),
         "has 8 bytes, and its data_offsets are [0,4]");
  expect(file_of(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8),
         "data_offsets are [8,0]");
  expect(file_of(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}})", 8),
         "data_offsets [0,8,8]");
  expect(file_of(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", 8),
         "data_offsets [-8,0]");
  expect(file_of(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12), "leave a gap");
  expect(file_of("{" + x + R"(,"y":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12),
         "overlap");
  expect(file_of("{" + x + R"(,"y":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8),
         "overlap");
  expect(file_of("{" + x + R"(,"y":{"dtype":"F32","shape":[2],"data_offsets":[12,20]}})", 20),
         "leave a gap");
  expect(file_of("{" + x + "}", 7), "is truncated");
  expect(file_of("{" + x + "}", 9), "holds bytes of no tensor");
  expect(file_of(R"({"__metadata__":3})", 0), "__metadata__ is not an object");
  expect(file_of(R"({"__metadata__":{"a":3}})", 0), "__metadata__ 'a' is not a string");

  expect(file_of(" {}", 0), "does not begin with '{'");
  expect(
      file_of(R"({"x":{"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}})", 0),
      "too large");
  expect(file_of(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[-0,8]}})", 8),
         "data_offsets [0,8]");
  const std::string most(100'000'000, ' ');  // NOLINT(bugprone-string-constructor): so long it is
  expect(file_of("{" + most + "}", 0),
         "its header has 100000002 bytes, and the format allows 100000000");

  EXPECT_THAT([&] { SafetensorsReader(folder.path() / "absent"); },
              ThrowsMessage<CheckpointError>(HasSubstr("No such file")));
  EXPECT_THROW(SafetensorsReader reader(folder.path()), CheckpointError);
}

// nlohmann's parser keeps its own stack, but its printing and copying of what was parsed recurse.
TEST(Safetensors, AHeaderThatNestsAMillionDeepIsAnError) {
  const TemporaryFolder folder;
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  for (const auto& header :
       {R"({"x":{"dtype":"F32","shape":)" + deep + R"(,"data_offsets":[0,0]}})",
        R"({"x":{"dtype":)" + deep + R"(,"shape":[],"data_offsets":[0,4]}})",
        R"({"__metadata__":{"x":)" + deep + "}}", deep}) {
    EXPECT_THAT([&] { SafetensorsReader(folder.write("deep", file_of(header, 0))); },
                ThrowsMessage<CheckpointError>(
                    AllOf(HasSubstr("deep is not"), HasSubstr("nests values more than 32 deep"))));
  }
}

TEST(Safetensors, MessagesQuoteOnlyTheBeginningOfWhatIsLong) {
  const TemporaryFolder folder;
  const std::string name(100'000, 'n');
  const auto path = folder.write("a", file_of("{\"" + name + R"(":{"dtype":"F32"}})", 0));
  try {
    SafetensorsReader reader(path);
    FAIL();
  } catch (const CheckpointError& error) {
    EXPECT_LT(std::string(error.what()).size(), 500U);
    EXPECT_THAT(error.what(), HasSubstr("nnn...' lacks a dtype"));
  }
}

// A mapped file would end the process by SIGBUS.
TEST(Safetensors, AFileThatIsTruncatedWhileItIsReadIsAnError) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "a.safetensors";
  SafetensorsWriter writer(path, {{"x", at::kFloat, {1 << 20}}});
  writer.write("x", at::ones({1 << 20}));
  writer.commit();
  const SafetensorsReader reader(path);
  std::filesystem::resize_file(path, 1 << 20);
  EXPECT_THAT([&] { reader.read("x"); },
              ThrowsMessage<CheckpointError>(
                  AllOf(HasSubstr(path.string()), HasSubstr("ends at byte 1048576"))));
}

TEST(Safetensors, NamesTheNearestTensor) {
  const TemporaryFolder folder;
  const auto path = folder.write(
      "a", file_of(R"({"wte.weight":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})", 0));
  EXPECT_THAT([&] { SafetensorsReader(path).read("wte.wieght"); },
              ThrowsMessage<CheckpointError>(HasSubstr("Did you mean 'wte.weight'?")));
}

}  // namespace
}  // namespace zero
