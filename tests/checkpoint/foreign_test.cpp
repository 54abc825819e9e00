// Checkpoints of DeepSpeed and of PyTorch: what is read of the samples is what those programs said
// when they saved, bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <fmt/format.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/checkpoint/samples.h"
#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/checkpoint/foreign/checkpoint_view.h"
#include "zero/checkpoint/manifest.h"

namespace zero::foreign {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Every tensor of a view, by "STATE.NAME", "parameter.NAME", "buffer.NAME".
std::map<std::string, at::Tensor> all_of(const CheckpointView& view) {
  std::map<std::string, at::Tensor> all;
  for (const auto& parameter : view.parameters) {
    for (const auto& [state, tensor] : parameter.states) {
      auto values = tensor.read();
      EXPECT_EQ(values.sizes(), parameter.shape);
      all[state + "." + parameter.name] = std::move(values);
    }
  }
  for (const auto& [name, tensor] : view.buffers) all["buffer." + name] = tensor.read();
  return all;
}

nlohmann::json json_of(const fs::path& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

std::vector<std::string> deepspeed_samples() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(samples() / "ds")) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

const std::vector<std::string> kTrained{"emb.weight", "norm.weight", "norm.bias", "fc1.weight",
                                        "fc1.bias",   "fc2.weight",  "fc2.bias",  "scale"};

// The master weights and moments of every sample are those that DeepSpeed said, and the model's
// values are the master weights rounded.
TEST(DeepSpeed, EverySampleHasTheStatesThatWereSaved) {
  EXPECT_EQ(deepspeed_samples().size(), 33);
  for (const auto& name : deepspeed_samples()) {
    SCOPED_TRACE(name);
    const auto said = json_of(samples() / "ds" / (name + ".expected.json"));
    const auto view = view_checkpoint(samples() / "ds" / name);
    EXPECT_EQ(view.stage, said["stage"]);
    EXPECT_EQ(view.steps, said["steps"].get<int64_t>() - said["skipped_steps"].get<int64_t>());
    const auto found = all_of(view);
    int compared = 0;
    for (const auto& [key, value] :
         tensors_of(samples() / "ds" / (name + ".expected.safetensors"))) {
      if (key == "buffer.mask") continue;  // it is not persistent
      const auto dot = key.find('.');
      const auto kind = key.substr(0, dot);
      const auto rest = key.substr(dot);
      const bool weight = kind == "fp32" || kind == "param";
      const auto place = found.find(weight ? "parameter" + rest : key);
      ASSERT_NE(place, found.end()) << key;
      auto mine = place->second;
      if (kind != "buffer") mine = mine.to(value.scalar_type());
      EXPECT_TRUE(same_bits(mine, value)) << key;
      ++compared;
    }
    EXPECT_GE(compared, 11);
    for (const auto& parameter : view.parameters) {
      const bool trained = parameter.name != "frozen.weight";
      EXPECT_EQ(parameter.optimizer.empty(), !trained) << parameter.name;
      if (!trained) continue;
      const bool one_group = name.ends_with("-g1");
      // The optimizer of stage 0 in few bits makes a step of zeros when it begins.
      const bool began = name == "z0-bf16" || name == "z0-fp16";
      EXPECT_EQ(parameter.steps, view.steps + (began ? 1 : 0));
      if (name.find("-g3") == std::string::npos) {
        EXPECT_EQ(parameter.group, one_group || parameter.shape.size() == 2 ? 0 : 1);
      }
      if (parameter.name == "emb.weight") {
        EXPECT_THAT(parameter.other_names, ElementsAre("head.weight"));
      }
    }
    EXPECT_EQ(view.parameters.size(), kTrained.size() + 1);
    // The rate is that of the next update.
    if (name.find("elastic") != std::string::npos) continue;
    for (size_t g = 0; g < view.groups.size(); ++g)
      EXPECT_EQ(nlohmann::json::parse(view.groups[g])["params"]["lr"], said["lr_after"][g]);
  }
}

TEST(DeepSpeed, MuonsMomentaAreTheSameAtStages2And3) {
  const auto two = view_checkpoint(samples() / "ds/z2-fp32-muon");
  const auto three = all_of(view_checkpoint(samples() / "ds/z3-fp32-muon"));
  int compared = 0;
  for (const auto& [key, value] : all_of(two)) {
    if (!key.starts_with("momentum_buffer.")) continue;
    EXPECT_TRUE(same_bits(value, three.at(key))) << key;
    ++compared;
  }
  EXPECT_EQ(compared, 3);
  EXPECT_EQ(two.parameters.front().optimizer, "Muon");
}

TEST(DeepSpeed, TheLossScaleGoesOnWhereItWas) {
  const auto view = view_checkpoint(samples() / "ds/z2-fp16-scaler2");
  const auto said = json_of(samples() / "ds/z2-fp16-scaler2.expected.json");
  ASSERT_TRUE(view.loss_scale);
  EXPECT_EQ(view.loss_scale->scale, said["loss_scale_after"]);
  EXPECT_EQ(view.steps, 2);
  EXPECT_TRUE(view_checkpoint(samples() / "ds/z3-fp16").loss_scale);
  EXPECT_FALSE(view_checkpoint(samples() / "ds/z3-bf16").loss_scale);
}

TEST(DeepSpeed, UniversalFoldersHaveTheStatesOfThoseTheyWereMadeFrom) {
  std::vector<std::pair<fs::path, std::string>> folders{
      {samples() / "universal-by-hand", "z1-fp32"},
      {samples() / "universal-by-hand-g1", "z1-fp32-g1"},
      {samples() / "universal-by-hand-bf16", "z3-bf16"}};
  for (const auto& name : deepspeed_samples()) {
    const auto converted = samples() / "ds" / name / "global_step3_universal";
    if (fs::exists(converted)) folders.emplace_back(converted, name);
  }
  EXPECT_GT(folders.size(), 5);
  for (const auto& [folder, name] : folders) {
    if (name.ends_with("-rr")) continue;  // DeepSpeed's converter writes wrong weights there
    SCOPED_TRACE(folder.string());
    const auto found = all_of(view_checkpoint(folder));
    const auto direct = all_of(view_checkpoint(samples() / "ds" / name));
    for (const auto& parameter : kTrained) {
      for (const auto* state : {"parameter.", "exp_avg.", "exp_avg_sq."})
        EXPECT_TRUE(same_bits(found.at(state + parameter), direct.at(state + parameter)))
            << state << parameter;
    }
  }
}

TEST(Distributed, EveryFormHasTheStatesThatWereSaved) {
  struct Form {
    const char* folder;
    const char* expected = "fsdp2";
    bool states = true;
    bool bf16 = false;
  };
  for (const auto& [folder, expected, with_states, bf16] :
       {Form{"dcp/fsdp2"}, Form{"dcp/fsdp2-flat"}, Form{"dcp/fsdp2-bf16", "fsdp2-bf16", true, true},
        Form{"dcp/single", "fsdp2", false}, Form{"dcp/safetensors", "fsdp2", false},
        Form{"dcp/hf", "fsdp2", false}, Form{"dcp/hf-consolidated", "fsdp2", false},
        Form{"dcp/hf-indexed", "fsdp2", false}, Form{"dcp-safetensors-by-hand", "fsdp2", false},
        Form{"dcp-by-hand"}}) {
    SCOPED_TRACE(folder);
    const auto view = view_checkpoint(samples() / folder);
    const auto found = all_of(view);
    for (const auto& [key, value] :
         tensors_of(samples() / fmt::format("dcp/{}.expected.safetensors", expected))) {
      const auto dot = key.find('.');
      const auto kind = key.substr(0, dot);
      const auto name = key.substr(dot + 1);
      if (name == "mask" || kind == "step") continue;
      const bool weight = kind == "param" || kind == "buffer";
      if (!weight && !with_states) continue;
      auto place = found.find((weight ? "parameter." : kind + ".") + name);
      if (place == found.end()) place = found.find("buffer." + name);
      if (place == found.end() && name == "count" &&
          std::string(folder).find("hf") != std::string::npos)
        continue;  // those have no integers
      ASSERT_NE(place, found.end()) << key;
      const auto wanted =
          weight && bf16 && value.is_floating_point() ? value.to(at::kBFloat16) : value;
      EXPECT_TRUE(same_bits(place->second, wanted)) << key;
    }
    if (!with_states) continue;
    EXPECT_EQ(view.steps, 3);
    EXPECT_EQ(view.groups.size(), 2);
    EXPECT_THAT(view.groups[0], AllOf(HasSubstr("AdamW"), HasSubstr("0.95")));
  }
}

TEST(Weights, ShardsWithAnIndexAreOneModel) {
  const auto expected = tensors_of(samples() / "plain/plain.expected.safetensors");
  for (const auto* folder : {"plain/hf-sharded", "plain/hf-sharded-bin", "plain/plain-nested.pt",
                             "plain/plain-legacy.pt", "plain/plain.expected.safetensors"}) {
    SCOPED_TRACE(folder);
    const auto view = view_checkpoint(samples() / folder);
    const auto found = all_of(view);
    for (const auto& [name, value] : expected) {
      auto place = found.find("parameter." + name);
      if (place == found.end()) place = found.find("buffer." + name);
      if (place == found.end() && name == "head.weight") continue;  // tied
      ASSERT_NE(place, found.end()) << name;
      EXPECT_TRUE(same_bits(place->second, value)) << name;
    }
    EXPECT_EQ(view.missing.size(), 1);
  }
}

TEST(WriteCheckpoint, KeepsAllBitsForAnyNumberOfRanks) {
  const TemporaryFolder folder;
  for (const auto* sample : {"ds/z3-bf16-subgroups", "ds/z2-fp16-scaler2", "dcp/fsdp2"}) {
    const auto view = view_checkpoint(samples() / sample);
    for (const int ranks : {1, 3}) {
      write_checkpoint(view, folder / "run", ranks);
      const auto back = view_checkpoint(folder / "run");
      EXPECT_EQ(back.steps, view.steps);
      EXPECT_EQ(back.loss_scale, view.loss_scale);
      EXPECT_EQ(back.groups.size(), view.groups.size());
      EXPECT_EQ(back.attached, view.attached);
      const auto found = all_of(back);
      const auto wanted = all_of(view);
      ASSERT_EQ(found.size(), wanted.size());
      for (const auto& [key, value] : wanted) EXPECT_TRUE(same_bits(found.at(key), value)) << key;
    }
  }
}

TEST(WriteCheckpoint, KeepsWhatBelongsToSingleRanksAndTheOrderOfElements) {
  const TemporaryFolder folder;
  const auto lazy = [](const at::Tensor& values) {
    return LazyTensor{values.scalar_type(), values.sizes().vec(), [values] { return values; }};
  };
  const auto weights = at::randn({2, 3, 2, 2});
  CheckpointView view;
  auto& parameter = view.parameters.emplace_back();
  parameter.name = "w";
  parameter.shape = {2, 3, 2, 2};
  parameter.strides = {12, 1, 6, 3};
  parameter.states["parameter"] = lazy(weights);
  view.buffers["mean"] = lazy(at::zeros({2}));
  view.attached["note"] = "rank 0";
  view.other_ranks.push_back({{{"mean", lazy(at::ones({2}))}}, {{"note", "rank 1"}}});
  for (const int ranks : {2, 3}) {
    const auto to = folder / fmt::format("of-{}", ranks);
    write_checkpoint(view, to, ranks);
    const auto back = view_checkpoint(to);
    EXPECT_THAT(back.parameters[0].strides, ElementsAre(12, 1, 6, 3));
    EXPECT_TRUE(same_bits(back.parameters[0].weights().read(), weights));
    for (int rank = 0; rank < ranks; ++rank) {
      const int from = rank % 2;
      EXPECT_EQ(back.attached_of(rank).at("note"), fmt::format("rank {}", from));
      EXPECT_TRUE(back.buffers_of(rank).at("mean").read().eq(from).all().item<bool>());
    }
    EXPECT_THAT(differences(back, view, 0), ElementsAre());
    auto other = view_checkpoint(to);
    other.other_ranks[0].buffers["mean"] = lazy(at::zeros({2}));
    EXPECT_THAT(differences(back, other, 0), ElementsAre(HasSubstr("mean of rank 1 differ")));
  }
}

TEST(WriteCheckpoint, NamesOfStatesAreNoPaths) {
  const TemporaryFolder folder;
  auto view = view_checkpoint(samples() / "ds/z2-fp32");
  auto& states = view.parameters.front().states;
  states["../../victim"] = states.at("parameter");
  write_checkpoint(view, folder / "a");
  EXPECT_THAT(message_of<CheckpointError>([&] { view_checkpoint(folder / "a"); }),
              HasSubstr("names the state '../../victim'"));
}

TEST(Foreign, FoldersThatAreNotCompleteAreRefusedByName) {
  const TemporaryFolder folder;
  const auto copied = [&](const char* sample) {
    fs::remove_all(folder / "a");
    fs::copy(samples() / sample, folder / "a", fs::copy_options::recursive);
    return folder / "a";
  };
  const auto refusal = [&] {
    return message_of<CheckpointError>([&] { all_of(view_checkpoint(folder / "a")); });
  };
  auto a = copied("ds/z2-fp32");
  fs::remove(a / "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt");
  EXPECT_THAT(refusal(), HasSubstr("has a file of rank 1 and none of rank 0"));
  a = copied("ds/z2-fp32");
  fs::remove(a / "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt");
  EXPECT_THAT(refusal(), HasSubstr("saved by 2 ranks, and the files of 1 are there"));
  a = copied("ds/z2-fp32");
  fs::rename(a / "global_step3", a / "moved");
  EXPECT_THAT(refusal(), HasSubstr("names the folder 'global_step3', which is not there"));
  a = copied("ds/z2-fp32");
  std::ofstream(a / "global_step3/layer_00-model_states.pt") << "x";
  EXPECT_THAT(refusal(), AllOf(HasSubstr("layer_00"), HasSubstr("pipeline")));
  a = copied("dcp/fsdp2");
  fs::resize_file(a / "__1_0.distcp", fs::file_size(a / "__1_0.distcp") - 5);
  EXPECT_THAT(refusal(), AllOf(HasSubstr("__1_0.distcp"), HasSubstr("truncated")));
  fs::remove(a / "__1_0.distcp");
  EXPECT_THAT(refusal(), HasSubstr("__1_0.distcp"));
  a = copied("plain/hf-sharded");
  EXPECT_TRUE(fs::remove(a / "model-00002-of-00002.safetensors"));
  EXPECT_THAT(refusal(), HasSubstr("model-00002-of-00002.safetensors is missing, which"));
  fs::remove_all(a);
  fs::create_directory(a);
  EXPECT_THAT(refusal(), HasSubstr("is no checkpoint of a known form"));
  std::ofstream(a / "notes.txt") << "mine";
  EXPECT_THAT(message_of<CheckpointError>(
                  [&] { write_checkpoint(view_checkpoint(samples() / "ds/z2-fp32"), a); }),
              HasSubstr("is no checkpoint of libzero"));
  std::ofstream(a / "manifest.json") << R"({"manifest_version": 3})";  // of another program
  EXPECT_THAT(message_of<CheckpointError>(
                  [&] { write_checkpoint(view_checkpoint(samples() / "ds/z2-fp32"), a); }),
              HasSubstr("is no checkpoint of libzero"));
  EXPECT_TRUE(fs::exists(a / "notes.txt"));
}

}  // namespace
}  // namespace zero::foreign
