// The table of docs/optimizers.md: which optimizer works at which stages, with its states in which
// place, in which precision. Each combination trains a small network for two steps on two ranks.
// Where it works its weights and states must have the bits of every other that the optimizer has in
// that precision; where it is refused, the table has the reason. `scripts/optimizer_table.sh`
// writes the table.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tests/engine/net.h"
#include "tests/engine/offload_runs.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"

namespace zero {
namespace {

constexpr const char* kBegin = "<!-- table of combinations: scripts/optimizer_table.sh -->\n";
constexpr const char* kEnd = "<!-- end of the table -->\n";

struct Named {
  std::string name;
  Optimizer optimizer;
};

std::vector<Named> optimizers() {
  return {{"AdamW, Adam", AdamW{.lr = 1e-2, .weight_decay = 0.1}},
          {"SGD", Sgd{.lr = 0.1}},
          {"SGD with momentum", Sgd{.lr = 0.1, .momentum = 0.9}},
          {"Adagrad", Adagrad{.lr = 1e-2}},
          {"Lion", Lion{.lr = 1e-3, .weight_decay = 0.1}},
          {"ScheduleFreeAdamW", ScheduleFreeAdamW{.lr = 1e-2, .warmup_steps = 2}},
          {"LAMB", Lamb{.lr = 1e-2}},
          {"Muon", Muon{.lr = 1e-2}},
          {"Adafactor", Adafactor{.lr = 1e-2}},
          {"Apollo", Apollo{.rank = 3}}};
}

struct Precision {
  std::string name;
  std::function<void(Config&)> set;
};

std::vector<Precision> precisions() {
  return {{"fp32", [](Config&) {}},
          {"bf16 with fp32 master weights", [](Config& c) { c.bf16 = true; }},
          {"bf16, split master weights", [](Config& c) { c.bf16 = c.split_master_weights = true; }},
          {"bf16 without master weights",
           [](Config& c) { c.bf16 = c.bf16_master_weights_and_grads = true; }},
          {"fp16 with fp32 master weights",
           [](Config& c) {
             c.fp16 = true;
             c.loss_scaling = {.initial_power = 4};
           }},
          {"fp32, states in 8 bits",
           [](Config& c) { c.optimizer_states = optim::StateFormat::eight_bit; }}};
}

struct Place {
  std::string name;
  std::vector<int> stages;
  std::function<Config(Config, const TemporaryFolder&)> put;
};

std::vector<Place> places() {
  const auto usual = [](Config c, const TemporaryFolder&) { return c; };
  const auto host = [](Config c, const TemporaryFolder&) {
    return optimizer_on_host(std::move(c));
  };
  const auto disk = [](Config c, const TemporaryFolder& at) { return on_disk(std::move(c), at); };
  const auto all_host = [](Config c, const TemporaryFolder&) { return all_on_host(std::move(c)); };
  const auto all_disk = [](Config c, const TemporaryFolder& at) {
    return all_on_disk(std::move(c), at);
  };
  return {{"device", {0, 1, 2, 3}, usual},
          {"host", {0, 1, 2, 3}, host},
          {"disk", {0, 1, 2, 3}, disk},
          {"all on the host", {3}, all_host},
          {"all on disk", {3}, all_disk}};
}

using States = std::vector<at::Tensor>;

// Returns weights and states after two steps of rank 0, or the reason of a refusal.
std::variant<States, std::string> train_on_two_ranks(const Config& c, const Optimizer& optimizer) {
  std::mutex mutex;
  std::variant<States, std::string> result;
  comm::run_as_threads(2, [&](auto group) {
    std::variant<States, std::string> mine;
    try {
      auto net = std::make_shared<Net>();
      Engine engine(net, optimizer, c, group);
      train(engine, *net, 2);
      engine.complete_update();
      States now = weights(engine);
      for (const auto& name : engine.parameter_names()) {
        std::vector<std::string_view> names{"exp_avg", "exp_avg_sq", "momentum_buffer",
                                            "sum",     "variance",   "z"};
        names.insert(names.end(), optim::kFactoredStates.begin(), optim::kFactoredStates.end());
        for (const auto state : names) {
          try {
            now.push_back(engine.optimizer_state(name, state).clone());
          } catch (const ConfigError&) {  // it has none of that name
          }
        }
      }
      mine = std::move(now);
    } catch (const ConfigError& error) {
      mine = std::string(error.what());
    }
    const std::lock_guard lock(mutex);
    if (group->rank() == 0) result = std::move(mine);
  });
  return result;
}

bool same(const States& a, const States& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) { return torch::equal(x, y); });
}

// Returns the cause of a refusal, without the remedy and the optimizer's name.
std::string cause(const std::string& message) {
  auto text = message.substr(0, message.find(". "));
  const auto remedy = text.find(" Leave the key out");
  text = text.substr(0, remedy);
  const auto name = text.find("an optimizer is ");
  if (name != std::string::npos) {
    const auto end = text.find(',', name);
    text = text.substr(0, name) + "the optimizer is one" + text.substr(end + 1);
  }
  return text;
}

class Table {
 public:
  explicit Table(const TemporaryFolder& folder) : folder_(folder) {}

  std::string text() {
    std::string rows = "| precision | optimizers |";
    for (const auto& place : places()) rows += fmt::format(" {} |", place.name);
    rows += "\n|---|---|";
    for (size_t i = 0; i < places().size(); ++i) rows += "---|";
    rows += "\n";
    for (const auto& precision : precisions()) {
      // Optimizers of which the same can be said have one row.
      std::vector<std::pair<std::string, std::vector<std::string>>> by_cells;
      for (const auto& each : optimizers()) {
        std::string cells;
        std::optional<States> expected;
        for (const auto& place : places())
          cells += fmt::format(" {} |", cell(each, precision, place, expected));
        auto row =
            std::ranges::find(by_cells, cells, [](const auto& known) { return known.first; });
        if (row == by_cells.end()) row = by_cells.insert(row, {cells, {}});
        row->second.push_back(each.name);
      }
      for (const auto& [cells, names] : by_cells) {
        rows += fmt::format(
            "| {} | {} |{}\n", precision.name,
            names.size() == optimizers().size() ? "all" : fmt::format("{}", fmt::join(names, ", ")),
            cells);
      }
    }
    rows += "\n";
    for (size_t i = 0; i < causes_.size(); ++i) rows += fmt::format("{}. {}.\n", i + 1, causes_[i]);
    return rows;
  }

 private:
  std::string cell(const Named& each, const Precision& precision, const Place& place,
                   std::optional<States>& expected) {
    std::vector<int> works;
    std::set<size_t> reasons;
    for (const int stage : place.stages) {
      SCOPED_TRACE(
          fmt::format("{}, {}, {}, stage {}", each.name, precision.name, place.name, stage));
      auto c = config(stage);
      precision.set(c);
      const auto result = train_on_two_ranks(place.put(std::move(c), folder_), each.optimizer);
      if (const auto* message = std::get_if<std::string>(&result)) {
        reasons.insert(number(cause(*message)));
        continue;
      }
      const auto& states = std::get<States>(result);
      if (!expected) expected = states;
      EXPECT_TRUE(same(states, *expected)) << "other bits";
      works.push_back(stage);
    }
    std::string text;
    if (works.size() == 1) text = fmt::format("{}", works.front());
    if (works.size() > 1) text = fmt::format("{} to {}", works.front(), works.back());
    if (!reasons.empty())
      text += fmt::format("{}({})", text.empty() ? "" : " ", fmt::join(reasons, ", "));
    return text;
  }

  size_t number(const std::string& cause) {
    auto found = std::ranges::find(causes_, cause);
    if (found == causes_.end()) found = causes_.insert(causes_.end(), cause);
    return static_cast<size_t>(found - causes_.begin()) + 1;
  }

  const TemporaryFolder& folder_;
  std::vector<std::string> causes_;
};

TEST(OptimizerTable, TheDocumentSaysWhatWorks) {
  const TemporaryFolder folder;
  const std::string path = std::string(ZERO_SOURCE) + "/docs/optimizers.md";
  std::ifstream file(path);
  const std::string document{std::istreambuf_iterator<char>(file), {}};
  const auto begin = document.find(kBegin);
  const auto end = document.find(kEnd);
  ASSERT_TRUE(begin != std::string::npos && end != std::string::npos) << path;
  const auto from = begin + std::string(kBegin).size();
  const auto table = Table(folder).text();
  if (std::getenv("ZERO_WRITE_TABLE") != nullptr) {
    std::ofstream(path) << document.substr(0, from) << table << document.substr(end);
    return;
  }
  EXPECT_EQ(document.substr(from, end - from), table) << "scripts/optimizer_table.sh writes it.";
}

}  // namespace
}  // namespace zero
