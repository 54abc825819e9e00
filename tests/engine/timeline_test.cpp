// The spans of a step, beside what the ledgers count of it.
#include "zero/base/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/engine/offload_runs.h"
#include "tests/engine/worlds.h"
#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/engine/chrome_trace.h"
#include "zero/engine/step_profile.h"

namespace zero {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Json = nlohmann::json;

struct Sum {
  int64_t count = 0;
  int64_t bytes = 0;
  bool operator==(const Sum&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Sum& sum) {
  return out << sum.count << " of " << sum.bytes << " bytes";
}

Sum sum_of(const std::vector<Span>& spans, Activity activity) {
  Sum sum;
  for (const auto& span : spans) {
    if (span.activity != activity) continue;
    ++sum.count;
    sum.bytes += span.bytes;
  }
  return sum;
}

Sum counted(comm::Group& group, std::initializer_list<comm::Collective> collectives) {
  Sum sum;
  for (const auto collective : collectives) {
    const auto count = group.traffic().count(collective);
    sum.count += count.calls;
    sum.bytes += count.logical_bytes;
  }
  return sum;
}

// Passes of the engine's step number `i`.
void run_step(Engine& engine, Net& net, Timeline& timeline, int64_t i) {
  const int64_t k = engine.config().gradient_accumulation_steps;
  for (int64_t m = 0; m < k; ++m) {
    at::Tensor loss;
    {
      const Timeline::Scope forward(timeline, Activity::forward);
      loss = loss_of(net, engine.group().rank(), i * k + m);
    }
    engine.backward(loss);
    engine.step();
  }
}

// Returns the ledgers' bytes of a step.
struct Counted {
  Sum gathers;
  Sum reductions;
  Sum control;
  int64_t read = 0;
  int64_t written = 0;
};

Counted count(Engine& engine, const DiskUse& before) {
  using enum comm::Collective;
  auto& group = engine.group();
  const auto disk = engine.disk();
  return {.gathers = counted(group, {all_gather, broadcast, all_to_all}),
          .reductions = counted(group, {reduce_scatter, all_reduce}),
          .control = counted(group, {control}),
          .read = disk.read - before.read,
          .written = disk.written - before.written};
}

void expect_spans_of(const Counted& counted, const std::vector<Span>& spans) {
  EXPECT_EQ(sum_of(spans, Activity::gather), counted.gathers);
  EXPECT_EQ(sum_of(spans, Activity::reduce), counted.reductions);
  EXPECT_EQ(sum_of(spans, Activity::control), counted.control);
  EXPECT_EQ(sum_of(spans, Activity::disk_read).bytes, counted.read);
  EXPECT_EQ(sum_of(spans, Activity::disk_write).bytes, counted.written);
}

void expect_phases(const std::vector<Span>& spans, int64_t passes) {
  for (const auto phase : {Activity::forward, Activity::backward, Activity::step})
    EXPECT_EQ(sum_of(spans, phase).count, passes) << name(phase);
  for (const auto& span : spans) {
    EXPECT_LE(span.begin, span.end);
    if (!is_wait(span.activity)) continue;
    EXPECT_TRUE(std::any_of(spans.begin(), spans.end(),
                            [&](const Span& phase) {
                              return is_phase(phase.activity) && phase.begin <= span.begin &&
                                     span.end <= phase.end;
                            }))
        << name(span.activity) << " in no phase";
  }
}

// The spans of the second step, which may make the updates that the first one has left; the third
// one waits for what the second leaves under way.
void compare(World world, const Config& c) {
  run_in(world, [&](std::shared_ptr<comm::Group> group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-2}, c, group);
    auto& timeline = *group->accounts().timeline;
    run_step(engine, *net, timeline, 0);
    EXPECT_THAT(timeline.spans(), IsEmpty()) << "it was off";
    group->traffic().reset();
    const auto before = engine.disk();
    StepProfile profile(*group, {.operators = false});
    run_step(engine, *net, timeline, 1);
    profile.stop();
    const auto counted = count(engine, before);
    run_step(engine, *net, timeline, 2);
    engine.complete_update();
    const auto spans = timeline.spans();
    expect_spans_of(counted, spans);
    expect_phases(spans, c.gradient_accumulation_steps);
    int64_t bytes = 0;
    for (const auto& unit : engine.layout().units()) bytes += unit.bytes();
    EXPECT_EQ(sum_of(spans, Activity::update),
              (Sum{engine.layout().unit_count(), c.stage == 0 ? bytes : bytes / group->size()}));
    EXPECT_EQ(timeline.dropped(), 0);
  });
}

TEST(StepSpans, AreThoseOfTheLedgersAtEachStage) {
  for (int stage = 0; stage <= 3; ++stage) {
    SCOPED_TRACE(stage);
    compare({1, 2}, config(stage));
    compare({1, 1}, config(stage, true, 2));
  }
}

TEST(StepSpans, AreThoseOfTheLedgersBetweenHosts) {
  compare(kTwoByOne, config(2));
  auto c = config(3);
  compare(kTwoByTwo, c);
  c.hpz_partition_size = 2;
  compare(kTwoByTwo, c);
}

TEST(StepSpans, AreThoseOfTheLedgersWithStatesOnDisk) {
  const TemporaryFolder folder;
  auto c = on_disk(config(2), folder);
  compare({1, 2}, c);
  c.update_in_backward = true;
  compare({1, 2}, c);
}

TEST(StepSpans, NameUnits) {
  comm::run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(2), group);
    StepProfile profile(*group);
    run_step(engine, *net, profile.timeline(), 0);
    profile.stop();
    for (const auto& span : profile.timeline().spans()) {
      if (span.activity == Activity::gather || span.activity == Activity::update) {
        EXPECT_THAT(std::string(span.label()), HasSubstr("unit "));
      }
      if (span.activity == Activity::reduce) {
        EXPECT_THAT(std::string(span.label()), HasSubstr("gradients of unit "));
      }
    }
  });
}

// The link need not wait for the update of all units.
TEST(StepSpans, AUnitIsSentAsSoonAsItIsUpdated) {
  for (int stage = 1; stage <= 2; ++stage) {
    run_in(kTwoByOne, [&](const std::shared_ptr<comm::Group>& group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{}, clipped(stage, true), group);
      StepProfile profile(*group);
      run_step(engine, *net, profile.timeline(), 0);
      profile.stop();
      std::vector<Span> spans;
      for (const auto& span : profile.timeline().spans()) {
        if (span.activity == Activity::update || span.activity == Activity::gather)
          spans.push_back(span);
      }
      std::ranges::sort(spans, {}, &Span::begin);
      ASSERT_EQ(spans.size(), 2 * static_cast<size_t>(engine.layout().unit_count()));
      for (size_t i = 0; i < spans.size(); i += 2) {
        EXPECT_EQ(spans[i].activity, Activity::update);
        EXPECT_EQ(spans[i + 1].activity, Activity::gather);
        EXPECT_EQ(spans[i].label(), spans[i + 1].label());
      }
    });
  }
}

TEST(StepProfile, IsOneAtATime) {
  const auto group = comm::single();
  StepProfile first(*group);
  EXPECT_THROW(StepProfile second(*group), Error);
  first.stop();
  EXPECT_NO_THROW(StepProfile second(*group));
}

TEST(Breakdown, SaysWhatOfThePhasesIsWaiting) {
  comm::run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(1), group);
    auto& timeline = *group->accounts().timeline;
    timeline.measure(true);
    run_step(engine, *net, timeline, 0);
    const auto told = timeline.take_breakdown();
    EXPECT_GT(told.forward, 0);
    EXPECT_GT(told.backward, 0);
    EXPECT_GT(told.step, 0);
    EXPECT_GT(told.gather, 0);
    EXPECT_GT(told.reduce, 0);
    EXPECT_GT(told.update, 0);
    EXPECT_GT(told.control, 0);
    EXPECT_EQ(told.disk, 0);
    EXPECT_LE(told.gather + told.reduce + told.update + told.control,
              told.forward + told.backward + told.step);
    EXPECT_THAT(timeline.spans(), IsEmpty());
  });
}

// --- Files ---

struct Slice {
  double begin = 0;
  double end = 0;
};

// Returns slices by thread; those of each thread must nest.
std::map<std::string, std::map<int64_t, std::vector<Slice>>> rows_of(const Json& trace) {
  std::map<int64_t, std::string> threads;
  std::map<int64_t, std::string> processes;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "M") continue;
    if (event["name"] == "thread_name") threads[event["tid"]] = event["args"]["name"];
    if (event["name"] == "process_name") processes[event["pid"]] = event["args"]["name"];
  }
  std::map<std::string, std::map<int64_t, std::vector<Slice>>> rows;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    const std::string row =
        processes.at(event["pid"]) + ", " + threads.at(event["tid"]).substr(0, 7);
    rows[row][event["tid"]].push_back(
        {event["ts"], event["ts"].get<double>() + event["dur"].get<double>()});
  }
  return rows;
}

void expect_nested(const std::vector<Slice>& slices) {
  std::vector<Slice> open;
  for (const auto& slice : slices) {
    while (!open.empty() && open.back().end <= slice.begin + 5e-4) open.pop_back();
    if (!open.empty()) {
      EXPECT_LE(slice.end, open.back().end + 5e-4);
    }
    open.push_back(slice);
  }
}

size_t slices_of(const std::map<int64_t, std::vector<Slice>>& lines) {
  size_t count = 0;
  for (const auto& [thread, slices] : lines) count += slices.size();
  return count;
}

TEST(StepProfileFile, HasAllRanksSpansInRowsThatNest) {
  const TemporaryFolder folder;
  const auto file = folder / "step.json";
  std::vector<std::vector<Span>> all(2);
  comm::run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(3), group);
    StepProfile profile(*group);
    run_step(engine, *net, profile.timeline(), 0);
    profile.stop();
    auto& mine = all[static_cast<size_t>(group->rank())];
    mine = profile.timeline().spans();
    const auto written = profile.write(file);
    group->barrier();
    EXPECT_EQ(written.spans, static_cast<int64_t>(all[0].size() + all[1].size()));
    EXPECT_EQ(written.dropped, 0);
    EXPECT_THAT(profile.timeline().spans(), IsEmpty());
  });
  const auto trace = Json::parse(read_file(file, fail<Error>));
  const auto rows = rows_of(trace);
  for (size_t rank = 0; rank < 2; ++rank) {
    const auto count = [&](std::initializer_list<Activity> activities) {
      int64_t sum = 0;
      for (const auto activity : activities) sum += sum_of(all[rank], activity).count;
      return static_cast<size_t>(sum);
    };
    const auto row = [&](const char* name) {
      return slices_of(rows.at("rank " + std::to_string(rank) + ", " + name));
    };
    using enum Activity;
    EXPECT_EQ(row("compute"), count({forward, backward, step, operation, wait_gather, wait_reduce,
                                     wait_update, wait_disk, wait_control}));
    EXPECT_EQ(row("gathers"), count({gather}));
    EXPECT_EQ(row("reducti"), count({reduce}));
    EXPECT_EQ(row("updates"), count({update}));
    EXPECT_EQ(row("control"), count({control}));
    EXPECT_GT(count({operation}), 20u);
  }
  for (const auto& [row, lines] : rows) {
    SCOPED_TRACE(row);
    for (const auto& [thread, slices] : lines) expect_nested(slices);
  }
  double first = 1e9;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "X") first = std::min(first, event["ts"].get<double>());
  }
  EXPECT_EQ(first, 0) << "one clock";
}

TEST(StepProfileFile, HasRanksOfSeveralHosts) {
  const TemporaryFolder folder;
  const auto file = folder / "step.json";
  run_in(kTwoByTwo, [&](std::shared_ptr<comm::Group> group) {
    StepProfile profile(*group);
    {
      const Timeline::Scope phase(profile.timeline(), Activity::forward);
      group->barrier();
    }
    profile.write(file);
  });
  const auto rows = rows_of(Json::parse(read_file(file, fail<Error>)));
  for (int rank = 0; rank < 4; ++rank) {
    const auto name = "rank " + std::to_string(rank);
    EXPECT_EQ(slices_of(rows.at(name + ", compute")), 2u) << "forward, and the wait in it";
    EXPECT_EQ(slices_of(rows.at(name + ", control")), 1u);
  }
}

TEST(StepProfileFile, ThatCannotBeWrittenFailsOnAllRanks) {
  comm::run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
    StepProfile profile(*group);
    EXPECT_THROW(profile.write("/nowhere/step.json"), Error);
    EXPECT_THAT(profile.timeline().spans(), IsEmpty());
  });
}

Span span(Activity activity, int64_t begin, int64_t end, std::string_view label) {
  Span made{.begin = begin, .end = end, .bytes = 7, .activity = activity};
  std::copy(label.begin(), label.end(), made.text.begin());
  return made;
}

TEST(ChromeTrace, PutsWhatIsUnderWayAtOnceOnLinesOfItsOwn) {
  const auto trace = Json::parse(chrome_trace(
      {{.rank = 0,
        .spans = {span(Activity::gather, 1000, 5000, "a"), span(Activity::gather, 2000, 3000, "b"),
                  span(Activity::gather, 5000, 6000, "c")}}},
      3, comm::LinkSpeed{.bandwidth = 125e6, .latency = 0.25e-3}));
  std::map<std::string, int64_t> line;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "X") line[event["name"]] = event["tid"];
  }
  EXPECT_NE(line.at("a"), line.at("b"));
  EXPECT_EQ(line.at("a"), line.at("c"));
  EXPECT_EQ(trace["otherData"]["dropped_spans"], 3);
  EXPECT_EQ(trace["otherData"]["link_bytes_per_s"], 125e6);
  EXPECT_EQ(trace["otherData"]["link_latency_ms"], 0.25);
}

TEST(ChromeTrace, BringsHostsClocksTogetherAndQuotesNames) {
  const auto trace = Json::parse(
      chrome_trace({{.rank = 0, .spans = {span(Activity::update, 10'000, 12'500, "x\"\\\n\x80")}},
                    {.rank = 1,
                     .clock = 1'000'000,
                     .spans = {span(Activity::update, 1'011'001, 1'011'002, "y")}}}));
  std::vector<Json> events;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "X") events.push_back(event);
  }
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0]["name"], "x\"\\??");
  EXPECT_EQ(events[0]["ts"], 0);
  EXPECT_EQ(events[0]["dur"], 2.5);
  EXPECT_EQ(events[0]["args"]["bytes"], 7);
  EXPECT_EQ(events[1]["ts"], 1.001);
  EXPECT_EQ(events[1]["dur"], 0.001);
  EXPECT_NE(events[0]["pid"], events[1]["pid"]);
}

}  // namespace
}  // namespace zero
