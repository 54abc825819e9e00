// Matrices that bitsandbytes has quantised, beside values that plain code computes.
#include "tests/checkpoint/bitsandbytes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/checkpoint/weight_files.h"

namespace zero {
namespace {

using test::add_int8;
using test::add_nf4;
using test::Tensors;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Bitsandbytes : public ::testing::Test {
 protected:
  Bitsandbytes() { at::manual_seed(3); }

  WeightFiles files() const {
    test::write_tensors(folder_.path() / kWeightsFile, tensors_);
    return WeightFiles(folder_.path());
  }

  Tensors tensors_;
  TemporaryFolder folder_;
};

TEST_F(Bitsandbytes, MatricesInNf4HaveTheValuesOfTheirCodes) {
  struct Case {
    int64_t rows, columns;
    test::Nf4Options options;
    at::ScalarType dtype;
  };
  const std::vector<Case> cases{
      {40, 48, {}, at::kFloat},
      {9, 11, {.dtype = "bfloat16"}, at::kBFloat16},
      {160, 200, {.dtype = "float16"}, at::kHalf},
      {24, 24, {.block = 128, .nested = false}, at::kFloat},
      {1, 7, {.block = 4096, .nested = false, .dtype = "float16"}, at::kHalf}};
  for (const auto& [rows, columns, options, dtype] : cases) {
    SCOPED_TRACE(rows);
    tensors_.clear();
    const auto expected = add_nf4(tensors_, "a.weight", rows, columns, options).to(dtype);
    tensors_["a.bias"] = at::ones({rows});
    const auto read = files();
    EXPECT_THAT(read.names(), ElementsAre("a.bias", "a.weight"));
    EXPECT_EQ(read.names_by_file().size(), 2U);
    EXPECT_EQ(read.info("a.weight"), (TensorInfo{"a.weight", dtype, {rows, columns}}));
    EXPECT_TRUE(read.read("a.weight").equal(expected));
    const auto flat = expected.view({-1});
    for (const int64_t begin : {int64_t{0}, int64_t{1}, flat.numel() / 3, flat.numel() - 1}) {
      for (const int64_t count :
           {int64_t{0}, int64_t{1}, (flat.numel() - begin) / 2, flat.numel() - begin}) {
        EXPECT_TRUE(read.read("a.weight", begin, count).equal(flat.narrow(0, begin, count)))
            << begin << " " << count;
      }
    }
    EXPECT_THAT(message_of<CheckpointError>([&] { read.read("a.weight", 1, flat.numel()); }),
                HasSubstr("'a.weight'"));
  }
}

TEST_F(Bitsandbytes, CodesMayLieInAnotherDtype) {
  const auto expected = add_nf4(tensors_, "a.weight", 16, 40);
  tensors_["a.weight"] = tensors_["a.weight"].view({-1}).view(at::kBFloat16).unsqueeze(1);
  const auto read = files();
  EXPECT_TRUE(read.read("a.weight").equal(expected));
  EXPECT_TRUE(read.read("a.weight", 100, 65).equal(expected.view({-1}).narrow(0, 100, 65)));
}

TEST_F(Bitsandbytes, MatricesIn8BitsHaveTheDtypeOfTheOthers) {
  const auto expected = add_int8(tensors_, "a", 6, 10).to(at::kHalf);
  tensors_["b.weight"] = at::ones({3}, at::kHalf);
  tensors_["c.SCB"] = at::ones({3});  // of a matrix that is not quantised
  tensors_["c.weight"] = at::ones({3, 2}, at::kHalf);
  const auto read = files();
  EXPECT_THAT(read.names(), ElementsAre("a.weight", "b.weight", "c.SCB", "c.weight"));
  EXPECT_TRUE(read.read("a.weight").equal(expected));
  EXPECT_TRUE(read.read("a.weight", 13, 25).equal(expected.view({-1}).narrow(0, 13, 25)));
}

TEST_F(Bitsandbytes, WhatCannotBeReadBackIsNamed) {
  const std::string state = "a.weight.quant_state.bitsandbytes__nf4";
  const auto text = [](const char* json) { return test::bytes_of(json); };
  struct Case {
    std::function<void(Tensors&)> change;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases{
      {[&](Tensors& all) {
         all["a.weight.quant_state.bitsandbytes__fp4"] = all[state];
         all.erase(state);
       },
       {"bitsandbytes__fp4", "'fp4'", "nf4"}},
      {[&](Tensors& all) { all.erase(state); }, {"a.weight.quant_map", "bitsandbytes__nf4"}},
      {[&](Tensors& all) { all.erase("a.weight"); }, {state, "'a.weight'"}},
      {[&](Tensors& all) { all.erase("a.weight.absmax"); }, {"'a.weight.absmax'"}},
      {[&](Tensors& all) { all.erase("a.weight.quant_map"); }, {"'a.weight.quant_map'"}},
      {[&](Tensors& all) { all.erase("a.weight.nested_absmax"); }, {"'a.weight.nested_absmax'"}},
      {[&](Tensors& all) { all.erase("a.weight.nested_quant_map"); },
       {"'a.weight.nested_quant_map'"}},
      {[&](Tensors& all) { all["a.weight"] = at::zeros({100}, at::kByte); },
       {"'a.weight'", "100 bytes", "takes 192"}},
      {[&](Tensors& all) { all["a.weight.absmax"] = at::zeros({5}, at::kByte); },
       {"'a.weight.absmax'", "5 elements", "are 6"}},
      {[&](Tensors& all) { all["a.weight.absmax"] = at::zeros({6}, at::kInt); },
       {"'a.weight.absmax'", "Int"}},
      {[&](Tensors& all) { all["a.weight.nested_absmax"] = at::zeros({2}); },
       {"'a.weight.nested_absmax'", "2 elements"}},
      {[&](Tensors& all) { all["a.weight.nested_quant_map"] = at::zeros({16}); },
       {"'a.weight.nested_quant_map'", "16 elements"}},
      {[&](Tensors& all) { all["a.weight.quant_map"] = at::zeros({16}); },
       {"'a.weight.quant_map'", "not those of NF4"}},
      {[&](Tensors& all) { all[state] = text("{"); }, {state, "JSON"}},
      {[&](Tensors& all) { all[state] = text("[]"); }, {state, "no object"}},
      {[&](Tensors& all) { all[state] = at::zeros({2}); }, {state, "not in bytes"}},
      {[&](Tensors& all) { all[state] = text("{}"); }, {state, "'quant_type'"}},
      {[&](Tensors& all) { all[state] = text(R"({"quant_type": "fp4"})"); },
       {state, "'quant_type'", "fp4"}},
      {[&](Tensors& all) { all[state] = text(R"({"quant_type": "nf4", "shape": [16, -1]})"); },
       {"'shape'", "[16,-1]"}},
      {[&](Tensors& all) {
         all[state] = text(R"({"quant_type": "nf4", "shape": [4611686018427387904, 4]})");
       },
       {"'shape'", "4611686018427387904"}},
      {[&](Tensors& all) {
         all[state] = text(R"({"quant_type": "nf4", "shape": [16, 24], "blocksize": 48})");
       },
       {"'blocksize'", "48"}},
      {[&](Tensors& all) {
         all[state] =
             text(R"({"quant_type": "nf4", "shape": [16, 24], "blocksize": 64, "dtype": "int8"})");
       },
       {"'dtype'", "int8"}},
      {[&](Tensors& all) {
         all[state] = text(
             R"({"quant_type": "nf4", "shape": [16, 24], "blocksize": 64, "dtype": "float16",
                 "nested_blocksize": 256})");
       },
       {"'nested_offset'"}},
      {[&](Tensors& all) { all.erase("b.weight"); }, {"'b.SCB'", "'b.weight'"}},
      {[&](Tensors& all) { all["b.SCB"] = at::ones({7}); }, {"'b.SCB'", "7 elements", "are 5"}},
      {[&](Tensors& all) { all["b.weight"] = at::ones({5}, at::kChar); },
       {"'b.weight'", "no matrix"}},
      {[&](Tensors& all) { all["b.weight_format"] = at::full({}, 2, at::kByte); },
       {"'b.weight_format'", "order"}},
  };
  Tensors good;
  add_nf4(good, "a.weight", 16, 24);
  add_int8(good, "b", 5, 8);
  tensors_ = good;
  EXPECT_EQ(files().names().size(), 2U);
  for (const auto& [change, words] : cases) {
    tensors_ = good;
    change(tensors_);
    const auto message = message_of<CheckpointError>([&] { files(); });
    EXPECT_THAT(message, HasSubstr(kWeightsFile));
    for (const auto& word : words) EXPECT_THAT(message, HasSubstr(word));
  }
}

}  // namespace
}  // namespace zero
