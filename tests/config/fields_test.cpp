// The table of settings: that a row is all that a setting needs.
#include "zero/config/fields.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"

namespace zero::fields {
namespace {

using testing::HasSubstr;

/// Values that a row may take, of which at least one is not the default.
std::vector<Json> samples(const Spec& row) {
  switch (row.kind) {
    case Kind::boolean:
      return {true, false};
    case Kind::integer:
    case Kind::bytes:
      return {row.about.multiple_of * 2, row.about.multiple_of * 3};
    case Kind::number:
      return {0.25, 0.75};
    case Kind::numbers:
      return {{0.25, 0.75}};
    case Kind::pair:
      return {{0.1, 0.2}};
    case Kind::text:
      return {"a \"quoted\" name", ""};
    case Kind::texts:
      return {"a", Json::array({"one, two", "other"})};
    case Kind::choice:
      return {row.choices.begin(), row.choices.end()};
    case Kind::section:
      if (row.key == "scheduler")
        return {{{"type", "WarmupLR"}, {"params", {{"warmup_num_steps", "auto"}}}},
                {{"type", "WSD"}, {"params", {{"decay_num_steps", 7}}}}};
      if (row.key != "optimizer") return {{{"err_beta", 0.5}, {"reset_T", 7}}};
      return {{{"type", "SGD"}, {"params", {{"lr", 0.5}, {"nesterov", true}}}}};
    case Kind::list:
      return {Json::array({"all_gather", "all_reduce"})};
    case Kind::anything:
      break;
  }
  return {};
}

// Each value by itself, the others being defaults: what nothing uses now is kept too, since a
// budget or a program may use it.
TEST(Fields, EveryValueIsDumpedAndReadBack) {
  for (const auto& row : settings()) {
    if (!row.get) continue;
    bool changed = false;
    for (const auto& sample : samples(row)) {
      if (row.about.not_empty && sample.is_string() && sample.get_ref<const std::string&>().empty())
        continue;
      Settings there;
      Report report;
      row.read(there, sample, row.key, report);
      changed = changed || there != Settings();
      EXPECT_EQ(read_settings(parse_json(there.dump(), "dump"), "dump"), there) << row.key;
      EXPECT_EQ(there.engine == Config(), row.part != Part::engine || there == Settings());
      EXPECT_EQ(there.model == ModelSettings(), row.part != Part::model || there == Settings());
    }
    EXPECT_TRUE(changed) << row.key;
  }
}

TEST(Fields, KeysAndOptionsAreGivenOnce) {
  std::set<std::string> keys;
  std::map<std::string, Kind> options;
  for (const auto& row : settings()) {
    EXPECT_TRUE(keys.insert(row.key).second) << row.key;
    EXPECT_FALSE(row.about.sentence.empty()) << row.key;
    if (row.about.option.empty()) continue;
    EXPECT_TRUE(row.about.option.starts_with("--")) << row.key;
    if (!row.about.by_option.is_null()) continue;
    // Rows that take what is said to one option take it alike.
    EXPECT_EQ(options.emplace(row.about.option, row.kind).first->second, row.kind) << row.key;
  }
}

TEST(Fields, EveryRowRefusesWhatIsNotOfItsTypeByName) {
  for (const auto& row : settings()) {
    if (!row.about.replaced_by.empty() || row.kind == Kind::anything) continue;
    const bool array_will_do =
        row.kind == Kind::text || row.kind == Kind::list || row.kind == Kind::numbers;
    const Json wrong = array_will_do ? Json(1) : Json::array({1});
    auto file = Json::object();
    put(file, row.key, wrong);
    try {
      (void)read_settings(file, "file.json");
      ADD_FAILURE() << row.key << " took " << wrong;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("file.json"));
      EXPECT_THAT(error.what(), HasSubstr(row.key + " is " + wrong.dump() + "; it must be "));
    }
  }
}

TEST(Fields, EveryKeyIsTheNearestToItselfMisspelt) {
  for (const auto& row : settings()) {
    const auto last = row.key.substr(row.key.rfind('.') + 1);
    if (last.size() < 6) continue;
    auto file = Json::object();
    put(file, row.key + "x", 1);
    Report report(false, true);
    (void)read_settings(file, "file.json", report);
    const auto& findings = report.findings();
    ASSERT_EQ(findings.size(), 1) << row.key << "x";
    EXPECT_EQ(findings[0].key, row.key + "x");
    EXPECT_THAT(findings[0].text, HasSubstr("'" + row.key + "x'"));
    EXPECT_THAT(findings[0].text, HasSubstr("Did you mean '" + last + "'?"));
  }
}

// A value of C++ is checked as one of a file is.
TEST(Fields, ARangeHoldsInFilesOptionsAndStructs) {
  Settings settings;
  settings.engine.offload_optimizer.ratio = 1.5;
  EXPECT_THAT([&] { settings.engine.validate(); },
              testing::ThrowsMessage<ConfigError>(
                  "zero_optimization.offload_optimizer.ratio is 1.5; it must be a number from 0 to "
                  "1."));
  EXPECT_THAT([] { Config::parse(R"({"zero_optimization": {"unit_bytes": 0}})", 1, "file"); },
              testing::ThrowsMessage<ConfigError>(
                  HasSubstr("unit_bytes is 0; it must be a number of bytes")));
  for (const auto& row : fields::settings()) {
    if (row.about.option != "--steps") continue;
    EXPECT_THAT([&] { (void)row.from_option("0"); },
                testing::ThrowsMessage<ConfigError>("--steps is 0; it must be a whole number, at "
                                                    "least 1."));
    EXPECT_THAT([&] { (void)row.from_option("many"); },
                testing::ThrowsMessage<ConfigError>(HasSubstr("--steps is \"many\"")));
    EXPECT_EQ(row.from_option("1e3"), Json(1000));
  }
}

// 0 means none where people write, and a program says so by leaving the member empty.
TEST(Fields, NoneIsNoNumberInAStruct) {
  auto settings = Settings::parse(R"({"train": {"save_every": 0}})", 1);
  EXPECT_EQ(settings.program.save_every, std::nullopt);
  EXPECT_EQ(Settings::parse(R"({"train": {"save_every": 5}})", 1).program.save_every, 5);
  settings.program.save_every = 0;
  EXPECT_THAT([&] { settings.validate(); },
              testing::ThrowsMessage<ConfigError>(
                  HasSubstr("train.save_every is 0; it must be a whole number, at least 1, or "
                            "none")));
}

TEST(Fields, TheTablesOfTheDocumentAreWhatTheRowsSay) {
  const auto document = TemporaryFolder::read(std::string(ZERO_SOURCE) + "/docs/config.md");
  const auto begin = document.find("<!-- tables: scripts/config_docs.sh -->\n");
  ASSERT_NE(begin, std::string::npos);
  const auto first = document.find('\n', begin) + 1;
  const auto last = document.find("<!-- end of tables -->");
  ASSERT_NE(last, std::string::npos);
  EXPECT_EQ(document.substr(first, last - first), markdown()) << "Run scripts/config_docs.sh.";
}

}  // namespace
}  // namespace zero::fields
