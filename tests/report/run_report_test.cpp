// The page of a report is whole in itself, has the run's figures, and holds no text of a log as
// code.
#include "zero/report/run_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <stack>
#include <string>

#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/models/architectures.h"
#include "zero/report/chart.h"
#include "zero/report/curves.h"
#include "zero/report/html.h"
#include "zero/report/plan_of_run.h"

namespace zero::report {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

RunLog some_run() {
  RunLog log;
  log.path = "folder/my_run/log.jsonl";
  log.name = "my_run";
  log.ranks = 2;
  log.parameters = 1234567;
  log.settings = {{"train.seq", "32", "command line"}, {"train.data", "text", "default"}};
  for (int64_t step = 1; step <= 1000; ++step) {
    LoggedStep logged{.step = step,
                      .loss = 5.0 / static_cast<double>(step),
                      .grad_norm = 1,
                      .lr = 1e-3,
                      .step_ms = 10,
                      .comm_ms = 2,
                      .disk_ms = 0,
                      .memory_peak = 1 << 20};
    log.steps.push_back(logged);
  }
  log.validations.push_back({.step = 500, .loss = 4.25});
  log.events.push_back({.step = 7, .kind = LoggedEvent::Kind::notice, .text = "Rank 1 is slow."});
  log.memory.resize(2);
  for (auto& rank : log.memory) {
    rank.usage[static_cast<size_t>(Category::optimizer)] = {.current = 0, .peak = 3 << 20};
    rank.formula[static_cast<size_t>(Category::optimizer)] = 3 << 20;
    rank.total.peak = 5 << 20;
  }
  log.traffic.resize(2);
  log.traffic_steps = 1000;
  log.traffic[0].counts[0].logical_bytes = int64_t{2048} * 1000;
  log.traffic[0].formula[0] = int64_t{4096} * 1000;
  log.end = train::EndReport{.steps = 1000, .seconds = 61, .reason = "finished", .model_file = ""};
  return log;
}

/// Returns what is wrong with the nesting of a page's elements; "" if nothing is.
std::string fault_of(const std::string& page) {
  const std::regex tag("<(/?)([a-z0-9]+)((?:[^>\"']|\"[^\"]*\"|'[^']*')*)>");
  std::stack<std::string> open;
  for (auto at = std::sregex_iterator(page.begin(), page.end(), tag); at != std::sregex_iterator();
       ++at) {
    const std::string name = (*at)[2];
    const std::string rest = (*at)[3];
    if (name == "meta" || (!rest.empty() && rest.back() == '/')) continue;
    if ((*at)[1].length() == 0) {
      open.push(name);
    } else if (open.empty() || open.top() != name) {
      return "</" + name + "> closes " + (open.empty() ? "nothing" : open.top());
    } else {
      open.pop();
    }
  }
  return open.empty() ? "" : open.top() + " stays open";
}

TEST(Report, HasTheFiguresOfTheRun) {
  const auto page = report({some_run()});
  EXPECT_EQ(fault_of(page), "");
  for (const auto* says : {"my_run", "1,234,567 parameters", "finished after step 1000 in 1:01",
                           "4.25000 after step 500", "Rank 1 is slow.", "command line", "3.00 MiB",
                           "2.00 KiB", "4.00 KiB", "waits for other ranks", "20.0 %",
                           "prefers-color-scheme: dark", "@media print"})
    EXPECT_THAT(page, HasSubstr(says));
}

TEST(Report, ShowsWhereALinkStoodStill) {
  auto run = some_run();
  EXPECT_THAT(report({run}), Not(HasSubstr("The link between hosts")));
  for (auto& step : run.steps)
    step.link = {.busy = 5, .nothing_to_send = 2, .processor = 2, .peer_late = 1};
  run.traffic[0].link = {.busy = 5000, .nothing_to_send = 2000};
  run.traffic[0].counts[0].link_bytes = int64_t{10'000'000};
  const auto page = report({run, some_run()});
  EXPECT_EQ(fault_of(page), "");
  for (const auto* says : {"The link between hosts", "nothing to send", "processor busy",
                           "peer late", "2.0 MB a second"})
    EXPECT_THAT(page, HasSubstr(says));
}

TEST(Report, NeedsNothingElse) {
  const auto page = report({some_run(), some_run()});
  for (const auto* never :
       {"<script", "<link", "<img", "src=", "href=", "url(", "@import", "http:", "https:"})
    EXPECT_THAT(page, Not(HasSubstr(never)));
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
  EXPECT_THAT(page, Not(HasSubstr("http-equiv='refresh'")));
  EXPECT_THAT(report({some_run()}, {.refresh_seconds = 7}),
              HasSubstr("http-equiv='refresh' content='7'"));
}

TEST(Report, EscapesWhatComesFromFiles) {
  const std::string evil = "</title></style><script>alert('1\"')</script>&\x01\xff";
  auto run = some_run();
  run.name = run.setting("train.seq") + evil;
  run.weights = run.tiers = run.prompt = run.sample = evil;
  run.end->reason = evil;
  run.unknown = {evil};
  run.events.push_back({.step = 8, .kind = LoggedEvent::Kind::anomaly, .text = evil});
  run.calls.push_back({.op = evil});
  run.settings.push_back({.key = evil, .value = evil, .origin = evil});
  run.configuration = run.model = evil;
  for (const auto& page : {report({run}), report({run, some_run()})}) {
    EXPECT_THAT(page, Not(HasSubstr("<script")));
    EXPECT_THAT(page, HasSubstr("&lt;script&gt;"));
    EXPECT_THAT(page, Not(HasSubstr("\x01")));
    EXPECT_THAT(page, Not(HasSubstr("\xff")));
    EXPECT_EQ(fault_of(page), "");
  }
}

// A run of which the log has nearly nothing has a report too, and so has one of equal values.
TEST(Report, IsMadeOfWhatThereIs) {
  RunLog empty;
  empty.name = "empty";
  EXPECT_EQ(fault_of(report({empty})), "");
  EXPECT_THAT(report({empty}), HasSubstr("It has no step yet"));
  auto one = some_run();
  one.steps.resize(1);
  one.steps[0].loss = kAbsent;
  one.end.reset();
  EXPECT_EQ(fault_of(report({one, empty})), "");
  EXPECT_THAT(report({one}), HasSubstr("the run goes on, or died"));
  for (const auto& page : {report({one}), report({some_run(), one})}) {
    EXPECT_THAT(page, Not(HasSubstr("='nan'")));
    EXPECT_THAT(page, Not(HasSubstr("='inf'")));
  }
  auto many = some_run();
  many.memory.resize(100, many.memory.front());
  many.traffic.resize(100);
  EXPECT_THAT(report({many}), HasSubstr("the 16 ranks of 100 that held most"));
  EXPECT_THROW(report({}), ConfigError);
  EXPECT_THROW(report({empty, empty, empty}), ConfigError);
}

TEST(Report, TellsTwoRunsApart) {
  auto other = some_run();
  other.settings[0].value = "64";
  const auto page = report({some_run(), other});
  EXPECT_THAT(page, HasSubstr("my_run (again)"));
  EXPECT_THAT(page, HasSubstr("<td>32 (command line)</td><td>64 (command line)</td>"));
  EXPECT_THAT(page, HasSubstr("1 settings that are the same"));
}

TEST(Report, PutsThePlanBesideTheMemory) {
  auto run = some_run();
  const auto model = R"({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2,
      "n_positions": 64, "vocab_size": 256, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
      "resid_pdrop": 0.0})";
  run.model = model;
  run.configuration = R"({"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 4,
      "train": {"seq": 32}})";
  const auto planned = planned_memory(run);
  ASSERT_TRUE(planned.memory) << planned.note;
  const auto parameters = planned.memory->of(Category::parameters);
  EXPECT_GT(parameters, 4 * 25000);
  EXPECT_GT(planned.memory->of(Category::activations), 0);
  EXPECT_THAT(report({run}), HasSubstr("plan: parameters"));
  run.configuration = R"({"train": {"seq": 32, "lora": {"rank": 4}}})";
  EXPECT_THAT(planned_memory(run).note, HasSubstr("adapters"));
  run.configuration = "nonsense";
  EXPECT_THAT(planned_memory(run).note, HasSubstr("There is no plan"));
}

TEST(Report, IsWrittenOverReportsAlone) {
  const TemporaryFolder folder;
  const auto file = folder / "report.html";
  write_report(file, page("first", "", 0));
  write_report(file, page("second", "", 0));
  EXPECT_THAT(TemporaryFolder::read(file), HasSubstr("second"));
  for (const auto* other : {"", "<!DOCTYPE html>\n<html></html>\n", "my thesis"}) {
    (void)folder.write("report.html", other);
    EXPECT_THROW(write_report(file, page("third", "", 0)), ConfigError);
    EXPECT_EQ(TemporaryFolder::read(file), other);
  }
  EXPECT_THROW(check_report(folder.path()), ConfigError);
  EXPECT_THROW(check_report(folder / "nowhere/report.html"), ConfigError);
}

// Many steps share a column, of which the least and the most are seen.
TEST(Curves, KeepSpikesOfManySteps) {
  Curve curve{.name = "loss", .colour = "red", .x = {}, .y = {}};
  for (int step = 0; step < 100000; ++step) {
    curve.x.push_back(step);
    curve.y.push_back(step == 50000 ? 9.5 : 1 + 1e-6 * step);
  }
  const auto picture = curves("loss", {curve}, {});
  EXPECT_LT(picture.size(), 80000U);
  EXPECT_THAT(picture, HasSubstr("to 9.5)"));
  EXPECT_EQ(curves("nothing", {{.name = "", .colour = "red", .x = {1}, .y = {kAbsent}}}, {}), "");
}

}  // namespace
}  // namespace zero::report
