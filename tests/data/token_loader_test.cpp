#include "zero/data/token_loader.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <set>
#include <tuple>

#include "tests/support/megatron_bytes.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/data/mixture.h"
#include "zero/data/permutation.h"

namespace zero {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Tokens that equal their positions: a batch then shows where it came from.
class TokenLoaderTest : public ::testing::Test {
 protected:
  TokenRange positions(int64_t count) {
    std::vector<uint16_t> tokens(static_cast<size_t>(count));
    std::iota(tokens.begin(), tokens.end(), uint16_t{0});
    const auto path = folder_.write(std::to_string(count) + ".bin", u16_bytes(tokens));
    return {std::make_shared<const Tokens>(std::vector{path}), 0, count};
  }

  TemporaryFolder folder_;
};

// The sequence number of each row, after checking that the row is that sequence and the targets
// follow.
std::vector<int64_t> sequences(const TokenLoader::Batch& batch, int64_t length,
                               int64_t origin = 0) {
  std::vector<int64_t> numbers;
  for (int64_t row = 0; row < batch.tokens.size(0); ++row) {
    const int64_t first = batch.tokens[row][0].item<int64_t>();
    EXPECT_EQ((first - origin) % length, 0);
    EXPECT_TRUE(at::equal(batch.tokens[row], at::arange(first, first + length)));
    EXPECT_TRUE(at::equal(batch.targets[row], at::arange(first + 1, first + length + 1)));
    numbers.push_back((first - origin) / length);
  }
  return numbers;
}

// Returns all samples in global order: micro-steps of all ranks.
std::vector<int64_t> order(const TokenRange& tokens, LoaderOptions options, int64_t micro_steps) {
  std::vector<TokenLoader> ranks;
  for (options.rank = 0; options.rank < options.world_size; ++options.rank)
    ranks.emplace_back(tokens, options);
  std::vector<int64_t> all;
  for (int64_t step = 0; step < micro_steps; ++step) {
    for (auto& rank : ranks) {
      for (const int64_t number : sequences(rank.next(), options.sequence, tokens.begin))
        all.push_back(number);
    }
  }
  return all;
}

TEST_F(TokenLoaderTest, AnEpochVisitsEachSequenceOnceOverAllRanks) {
  const auto tokens = positions(8 * 24 + 5);
  for (const int64_t world : {1, 2, 3, 4}) {
    for (const int64_t micro : {1, 2}) {
      const int64_t steps = 24 / (world * micro);
      auto seen = order(
          tokens, {.sequence = 8, .micro_batch = micro, .world_size = world, .seed = 3}, 2 * steps);
      for (int epoch = 0; epoch < 2; ++epoch) {
        const std::set<int64_t> distinct(seen.begin() + epoch * 24,
                                         seen.begin() + (epoch + 1) * 24);
        EXPECT_EQ(distinct.size(), 24U) << world << " " << micro;
        EXPECT_EQ(*distinct.begin(), 0);
        EXPECT_EQ(*distinct.rbegin(), 23);
      }
    }
  }
}

TEST_F(TokenLoaderTest, TheGlobalOrderDependsNeitherOnRanksNorOnTheMicroBatch) {
  const auto tokens = positions(4 * 30 + 1);
  const auto expected = order(tokens, {.sequence = 4, .micro_batch = 1, .seed = 9}, 72);
  for (const int64_t world : {2, 3, 4}) {
    for (const int64_t micro : {1, 2, 3}) {
      EXPECT_EQ(order(tokens, {.sequence = 4, .micro_batch = micro, .world_size = world, .seed = 9},
                      72 / (world * micro)),
                expected);
    }
  }
}

TEST_F(TokenLoaderTest, SeedAndEpochDecideTheOrder) {
  const auto tokens = positions(4 * 50 + 1);
  const auto run = [&](uint64_t seed, bool shuffle) {
    return order(tokens, {.sequence = 4, .seed = seed, .shuffle = shuffle}, 100);
  };
  const auto first = run(1, true);
  EXPECT_EQ(first, run(1, true));
  EXPECT_NE(first, run(2, true));
  EXPECT_NE(std::vector(first.begin(), first.begin() + 50),
            std::vector(first.begin() + 50, first.end()));
  std::vector<int64_t> plain(50);
  std::iota(plain.begin(), plain.end(), 0);
  const auto unshuffled = run(1, false);
  EXPECT_EQ(std::vector(unshuffled.begin(), unshuffled.begin() + 50), plain);
}

TEST_F(TokenLoaderTest, ResumesInMidEpochAtAnotherNumberOfRanks) {
  const auto tokens = positions(4 * 25 + 1);
  const auto expected = order(tokens, {.sequence = 4, .micro_batch = 1, .seed = 5}, 60);
  TokenLoader before(tokens,
                     {.sequence = 4, .micro_batch = 3, .rank = 1, .world_size = 2, .seed = 5});
  for (int step = 0; step < 3; ++step) before.next();
  const auto state = LoaderState::from_json(before.state().to_json());
  EXPECT_EQ(state, before.state());
  EXPECT_EQ(state.sample, 18);
  TokenLoader after(tokens,
                    {.sequence = 4, .micro_batch = 2, .rank = 2, .world_size = 4, .seed = 5});
  after.restore(state);
  for (int64_t sample = 18 + 4; sample + 8 <= 60; sample += 8) {
    const auto rows = sequences(after.next(), 4);
    EXPECT_EQ(rows, (std::vector{expected[sample], expected[sample + 1]})) << sample;
  }
  EXPECT_EQ(after.epoch(), 2);
  after.rewind();
  EXPECT_EQ(after.state().sample, 0);
}

TEST_F(TokenLoaderTest, RefusesAStateOfAnotherRun) {
  const auto tokens = positions(101);
  TokenLoader loader(tokens, {.sequence = 4, .seed = 5});
  const auto good = loader.state();
  for (const auto change :
       {+[](LoaderState& s) { s.sequence = 5; }, +[](LoaderState& s) { s.sequences = 24; },
        +[](LoaderState& s) { s.seed = 6; }, +[](LoaderState& s) { s.sample = -1; }}) {
    auto state = good;
    change(state);
    EXPECT_THROW(loader.restore(state), DataError);
  }
  EXPECT_THROW(LoaderState::from_json("{}"), DataError);
  EXPECT_THROW(LoaderState::from_json("{"), DataError);
  EXPECT_THROW(
      LoaderState::from_json(R"({"sample": 1.5, "sequence": 4, "sequences": 25, "seed": 5})"),
      DataError);
}

TEST_F(TokenLoaderTest, StaysWithinItsRange) {
  auto tokens = positions(100);
  tokens.begin = 41;
  tokens.end = 70;  // 29 tokens: 7 sequences of 4 and the last target
  TokenLoader loader(tokens, {.sequence = 4, .micro_batch = 7});
  EXPECT_EQ(loader.sequences(), 7);
  const auto batch = loader.next();
  EXPECT_GE(batch.tokens.min().item<int64_t>(), 41);
  EXPECT_EQ(batch.targets.max().item<int64_t>(), 69);
  const auto rows = sequences(batch, 4, 41);
  EXPECT_EQ(std::set<int64_t>(rows.begin(), rows.end()).size(), 7U);
}

TEST_F(TokenLoaderTest, CountsTheSequencesOfAnEpoch) {
  const TokenLoader loader(positions(4 * 25 + 1),
                           {.sequence = 4, .micro_batch = 3, .world_size = 2});
  EXPECT_EQ(loader.sequences(), 25);
}

TEST_F(TokenLoaderTest, ReusesABatchOnlyOnceItIsLetGo) {
  TokenLoader loader(positions(200), {.sequence = 4, .micro_batch = 2});
  const void* address = nullptr;
  {
    const auto batch = loader.next();
    address = batch.tokens.const_data_ptr();
  }
  auto second = loader.next();
  EXPECT_EQ(second.tokens.const_data_ptr(), address) << "no allocation in the steady state";
  const auto kept = second.tokens.select(0, 1);  // as autograd may keep a view
  const auto copy = kept.clone();
  second = {};
  loader.next();
  loader.next();
  EXPECT_TRUE(at::equal(kept, copy));
}

TEST_F(TokenLoaderTest, RefusesSplitsThatAreTooSmall) {
  const auto tokens = positions(9);
  EXPECT_NO_THROW(TokenLoader(tokens, {.sequence = 8}));
  EXPECT_THAT([&] { TokenLoader(tokens, {.sequence = 9}); },
              ThrowsMessage<DataError>(HasSubstr("one sequence of 9 with its target needs 10")));
  EXPECT_THAT([&] { TokenLoader(tokens, {.sequence = 2, .micro_batch = 1, .world_size = 5}); },
              ThrowsMessage<DataError>(
                  HasSubstr("4 sequences of 2 tokens, fewer than the 5 that 5 ranks")));
  EXPECT_THROW(TokenLoader(TokenRange{tokens.tokens, 4, 4}, {.sequence = 1}), DataError);
  EXPECT_THROW(TokenLoader(tokens, {.sequence = 0}), ConfigError);
  EXPECT_THROW(TokenLoader(tokens, {.sequence = 1, .micro_batch = 0}), ConfigError);
  EXPECT_THAT([&] { TokenLoader(tokens, {.sequence = 1, .rank = 2, .world_size = 2}); },
              ThrowsMessage<ConfigError>(HasSubstr("The rank is 2 of 2")));
  EXPECT_THROW(TokenLoader(TokenRange{}, {.sequence = 1}), ConfigError);
}

TEST_F(TokenLoaderTest, RefusesTokensOutsideOfTheVocabulary) {
  const auto tokens = positions(100);
  EXPECT_NO_THROW(TokenLoader(tokens, {.sequence = 4, .vocab_size = 100}));
  EXPECT_THAT([&] { TokenLoader(tokens, {.sequence = 4, .vocab_size = 99}); },
              ThrowsMessage<DataError>(
                  ::testing::AllOf(HasSubstr("the token 99"), HasSubstr("vocabulary has 99"))));
}

TEST_F(TokenLoaderTest, RefusesSuchTokensFarIntoTheFileAsTheyAreRead) {
  // Beyond what is looked at when the loader is made.
  const int64_t count = (int64_t{1} << 24) + 64;
  std::vector<uint16_t> values(static_cast<size_t>(count), 1);
  values[(size_t{1} << 24) + 10] = 900;
  const auto path = folder_.write("far.bin", u16_bytes(values));
  const TokenRange tokens{std::make_shared<const Tokens>(std::vector{path}), 0, count};
  TokenLoader loader(tokens, {.sequence = count / 3 / 7, .shuffle = false, .vocab_size = 900});
  int batches = 0;
  EXPECT_THAT(
      [&] {
        for (; batches < 100; ++batches) loader.next();
      },
      ThrowsMessage<DataError>(HasSubstr("the token 900")));
  EXPECT_EQ(batches, 20);
}

TEST_F(TokenLoaderTest, IgnoresTargetsThatTheMarksDoNotName) {
  const int64_t count = 4 * 8 + 1;
  std::string marks;
  for (int64_t i = 0; i < count; ++i)
    marks +=
        static_cast<char>(i % 3 == 0 ? kSupervised | kBeginsDocument : i % 2 * kBeginsDocument);
  folder_.write(std::to_string(count) + ".marks.bin", marks);
  const auto tokens = positions(count);
  EXPECT_TRUE(tokens.tokens->marked());
  for (const bool follows : {true, false}) {
    TokenLoader loader(tokens, {.sequence = 8, .micro_batch = 2, .seed = 1, .marks = follows});
    for (int i = 0; i < 2; ++i) {
      const auto batch = loader.next();
      const auto next = batch.tokens + 1;
      const auto kept = follows ? next.remainder(3).eq(0) : next.ge(0);
      EXPECT_TRUE(batch.targets.equal(at::where(kept, next, at::full_like(next, -100))));
    }
  }
  folder_.write(std::to_string(count) + ".marks.bin", marks.substr(1));
  EXPECT_THAT([&] { positions(count); }, ThrowsMessage<DataError>(HasSubstr("32 marks")));
  marks[20] = 8;
  folder_.write(std::to_string(count) + ".marks.bin", marks);
  TokenLoader loader(positions(count), {.sequence = 8, .micro_batch = 4});
  EXPECT_THAT([&] { loader.next(); }, ThrowsMessage<DataError>(HasSubstr("the byte 8 at 20")));
}

TEST_F(TokenLoaderTest, SaysWhereTokensStandInTheirDocuments) {
  // Documents of 5 tokens, of which the last is supervised: token 3 begins the first whole one.
  const int64_t count = 4 * 8 + 1;
  std::string marks;
  for (int64_t i = 0; i < count; ++i)
    marks += static_cast<char>(i % 5 == 3 ? kBeginsDocument : i % 5 == 2 ? kSupervised : 0);
  folder_.write(std::to_string(count) + ".marks.bin", marks);
  for (const bool follows : {true, false}) {
    TokenLoader loader(
        positions(count),
        {.sequence = 8, .micro_batch = 2, .shuffle = false, .marks = follows, .documents = true});
    EXPECT_TRUE(loader.documents());
    for (int i = 0; i < 2; ++i) {
      const auto batch = loader.next();
      for (int64_t row = 0; row < 2; ++row) {
        for (int64_t column = 0; column < 8; ++column) {
          const int64_t token = batch.tokens[row][column].item<int64_t>();
          const int64_t next = (token + 1) % 5;
          const bool supervised = next != 3 && (!follows || next == 2);
          EXPECT_EQ(batch.positions[row][column].item<int64_t>(),
                    std::min(column, (token + 2) % 5));
          EXPECT_EQ(batch.targets[row][column].item<int64_t>(), supervised ? token + 1 : -100);
        }
      }
    }
  }
  EXPECT_FALSE(TokenLoader(positions(count), {.sequence = 8}).next().positions.defined());

  // Megatron's index says the same.
  MegatronDocuments<int32_t> documents{{{0, 1, 2}}};
  for (int32_t i = 3; i < count; ++i) {
    if (i % 5 == 3) documents.push_back({{}});
    documents.back().back().push_back(i);
  }
  const auto path = megatron_bytes<int32_t>(4, documents).write(folder_, "megatron");
  LoaderOptions options{.sequence = 8, .micro_batch = 2, .marks = false, .documents = true};
  TokenLoader marked(positions(count), options);
  options.marks = true;
  TokenLoader indexed(TokenRange{std::make_shared<const Tokens>(std::vector{path}), 0, count},
                      options);
  for (int i = 0; i < 2; ++i) {
    const auto expected = marked.next();
    const auto batch = indexed.next();
    EXPECT_TRUE(batch.tokens.equal(expected.tokens));
    EXPECT_TRUE(batch.targets.equal(expected.targets));
    EXPECT_TRUE(batch.positions.equal(expected.positions));
  }
}

// Sources whose tokens are their positions, from 0, 10000 and 20000 on.
class MixtureTest : public TokenLoaderTest {
 protected:
  Split split(const std::vector<int64_t>& sequences, std::vector<double> weights = {}) {
    Split all;
    for (size_t i = 0; i < sequences.size(); ++i) {
      std::vector<uint16_t> tokens(static_cast<size_t>(4 * sequences[i] + 1));
      std::iota(tokens.begin(), tokens.end(), static_cast<uint16_t>(10000 * i));
      const auto path = folder_.write(std::to_string(i) + ".bin", u16_bytes(tokens));
      all.sources.push_back({std::make_shared<const Tokens>(std::vector{path}), 0,
                             static_cast<int64_t>(tokens.size())});
    }
    all.weights = std::move(weights);
    return all;
  }
  // The first token of each sequence in global order.
  static std::vector<int64_t> samples(const Split& split, LoaderOptions options, int64_t count,
                                      const LoaderState* from = nullptr) {
    std::vector<TokenLoader> ranks;
    for (options.rank = 0; options.rank < options.world_size; ++options.rank) {
      ranks.emplace_back(split, options);
      if (from != nullptr) ranks.back().restore(*from);
    }
    std::vector<int64_t> all;
    while (std::ssize(all) < count) {
      for (auto& rank : ranks) {
        const auto batch = rank.next();
        EXPECT_TRUE(batch.targets.equal(batch.tokens + 1));
        for (int64_t row = 0; row < options.micro_batch; ++row)
          all.push_back(batch.tokens[row][0].item<int64_t>());
      }
    }
    all.resize(static_cast<size_t>(count));
    return all;
  }
};

TEST_F(MixtureTest, SamplesAreSpreadAsTheWeightsSay) {
  struct Case {
    std::vector<double> weights;
    std::vector<int64_t> counts;
  };
  for (const auto& [weights, counts] : std::vector<Case>{
           {{0.7, 0.3}, {2867, 1229}},
           {{7e300, 3e300}, {2867, 1229}},
           {{1, 1, 1}, {1366, 1365, 1365}},
           {{1e-9, 1, 1e-9}, {1, 4094, 1}},
           {{5}, {4096}},
       }) {
    const Mixture mixture(weights);
    EXPECT_EQ(mixture.counts(), counts);
    std::vector<int64_t> given(weights.size());
    for (int64_t sample = 0; sample < 2 * Mixture::kBlock; ++sample) {
      const auto place = mixture(sample);
      ASSERT_EQ(place.sample, given[place.source]++) << sample;
      for (size_t source = 0; source < counts.size(); ++source) {
        const int64_t ahead = given[source] * Mixture::kBlock - counts[source] * (sample + 1);
        ASSERT_LT(ahead, Mixture::kBlock) << "a whole sample at " << sample;
      }
    }
    for (size_t source = 0; source < counts.size(); ++source)
      EXPECT_EQ(given[source], 2 * counts[source]);
  }
  for (const double bad : {0.0, -1.0, std::nan(""), HUGE_VAL}) {
    EXPECT_THAT(
        [&] {
          Mixture({1, bad});
        },
        ThrowsMessage<ConfigError>(HasSubstr("each must be a number above 0")));
  }
  EXPECT_THROW(Mixture({}), ConfigError);
  EXPECT_THROW(Mixture(std::vector<double>(4097, 1.0)), ConfigError);
  EXPECT_EQ(Mixture(std::vector<double>(4096, 1.0))(4095).source, 4095U);
}

TEST_F(MixtureTest, EachSourceHasEpochsOfItsOwn) {
  const auto mixed = split({10, 30, 20}, {0.5, 0.25, 0.25});
  const auto all = samples(mixed, {.sequence = 4, .micro_batch = 1, .seed = 3}, 120);
  for (const auto& [source, sequences, epochs] : {std::tuple{0, 10, 6}, {1, 30, 1}, {2, 20, 1}}) {
    std::vector<int64_t> of_source;
    for (const auto token : all) {
      if (token / 10000 == source) of_source.push_back(token);
    }
    ASSERT_EQ(std::ssize(of_source), source == 0 ? 60 : 30);
    for (int64_t epoch = 0; epoch < epochs; ++epoch) {
      const auto begin = of_source.begin() + epoch * sequences;
      EXPECT_EQ(std::ssize(std::set(begin, begin + sequences)), sequences) << source;
    }
  }
  for (const int64_t world : {1, 2, 3}) {
    for (const int64_t micro : {1, 4}) {
      EXPECT_EQ(samples(mixed,
                        {.sequence = 4, .micro_batch = micro, .world_size = world, .seed = 3}, 120),
                all);
    }
  }
  // One source with a weight is as without.
  EXPECT_EQ(samples(split({30}, {2}), {.sequence = 4, .seed = 3}, 70),
            samples(split({30}), {.sequence = 4, .seed = 3}, 70));
}

TEST_F(MixtureTest, WithoutWeightsEachSequenceComesOnceInAnEpoch) {
  const auto all = samples(split({10, 30, 20}), {.sequence = 4, .micro_batch = 2}, 120);
  for (const auto epoch : {0, 1}) {
    const auto begin = all.begin() + epoch * 60;
    EXPECT_EQ(std::set(begin, begin + 60).size(), 60U);
  }
  auto order = samples(split({2, 3}), {.sequence = 4, .shuffle = false}, 5);
  EXPECT_EQ(order, (std::vector<int64_t>{0, 4, 10000, 10004, 10008}));
}

TEST_F(MixtureTest, ResumesAtAnotherNumberOfRanksAndRefusesAnotherMixture) {
  const auto mixed = split({10, 30}, {0.7, 0.3});
  const auto all = samples(mixed, {.sequence = 4, .seed = 3}, 5000);
  TokenLoader before(mixed, {.sequence = 4, .micro_batch = 2, .world_size = 3, .seed = 3});
  for (int i = 0; i < 700; ++i) before.next();  // beyond a block
  const auto state = LoaderState::from_json(before.state().to_json());
  EXPECT_EQ(state, before.state());
  EXPECT_EQ(
      samples(mixed, {.sequence = 4, .micro_batch = 1, .world_size = 2, .seed = 3}, 800, &state),
      std::vector(all.begin() + 4200, all.end()));
  const auto refused = [&](const Split& other, const char* message) {
    TokenLoader loader(other, {.sequence = 4, .seed = 3});
    EXPECT_THAT([&] { loader.restore(state); }, ThrowsMessage<DataError>(HasSubstr(message)));
  };
  refused(split({10, 30}, {0.6, 0.4}),
          "shares of 4096 samples (by --data-weights) 2867, 1229, and this one has 2458, 1638");
  refused(split({10, 30}), "(by --data-weights) 2867, 1229, and this one has none");
  refused(split({20, 20}, {0.7, 0.3}), "in a mixture 10, 30, and this one has 20, 20");
  refused(split({40}), "in a mixture 10, 30, and this one has none");
  EXPECT_THAT(
      [] {
        LoaderState::from_json(
            R"({"sample": 1, "sequence": 4, "sequences": 25, "seed": 5, "shares": [1.5]})");
      },
      ThrowsMessage<DataError>(HasSubstr("the shares [1.5], which are not whole numbers")));
}

TEST_F(MixtureTest, FollowsTheMarksOfThoseThatHaveThem) {
  folder_.write("1.marks.bin", std::string(4 * 3 + 1, '\0'));
  TokenLoader loader(split({3, 3}), {.sequence = 4, .micro_batch = 6, .shuffle = false});
  const auto batch = loader.next();
  EXPECT_TRUE(batch.targets.narrow(0, 0, 3).equal(batch.tokens.narrow(0, 0, 3) + 1));
  EXPECT_TRUE(batch.targets.narrow(0, 3, 3).eq(-100).all().item<bool>());
  EXPECT_THAT(
      [&] {
        TokenLoader(split({3, 3}), {.sequence = 4, .documents = true});
      },
      ThrowsMessage<DataError>(HasSubstr("0.bin has no marks")));
}

TEST(Permutation, IsOneForEverySize) {
  for (const int64_t size : {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 1000}) {
    for (const uint64_t epoch : {0, 1}) {
      const Permutation permutation(size, 42, epoch);
      std::vector<int> hits(static_cast<size_t>(size));
      for (int64_t i = 0; i < size; ++i) {
        const int64_t to = permutation(i);
        ASSERT_TRUE(to >= 0 && to < size);
        ++hits[static_cast<size_t>(to)];
      }
      EXPECT_EQ(std::count(hits.begin(), hits.end(), 1), size) << size;
    }
  }
}

TEST(Permutation, IsTheSameOnEveryMachine) {
  std::vector<int64_t> order;
  const Permutation permutation(10, 7, 2);
  for (int64_t i = 0; i < 10; ++i) order.push_back(permutation(i));
  EXPECT_EQ(order, (std::vector<int64_t>{2, 6, 3, 8, 7, 4, 9, 5, 1, 0}));
}

TEST(Permutation, LooksRandom) {
  // Each of 8 positions takes each of 8 values about equally often over seeds: chi-squared with 49
  // degrees of freedom stays below 100 (p < 3e-5).
  constexpr int kSize = 8;
  constexpr int kTrials = 8000;
  std::array<std::array<double, kSize>, kSize> hits{};
  int64_t neighbours = 0;
  for (uint64_t seed = 0; seed < kTrials; ++seed) {
    const Permutation permutation(kSize, seed, 0);
    for (int64_t i = 0; i < kSize; ++i) {
      hits[i][permutation(i)] += 1;
      neighbours += i > 0 && permutation(i) == permutation(i - 1) + 1;
    }
  }
  double chi = 0;
  const double expected = static_cast<double>(kTrials) / kSize;
  for (const auto& row : hits) {
    for (const double count : row) chi += (count - expected) * (count - expected) / expected;
  }
  EXPECT_LT(chi, 100);
  // 7 neighbouring pairs, each a run with probability 7 / 56.
  EXPECT_NEAR(static_cast<double>(neighbours) / kTrials, 7.0 * 7 / 56, 0.06);
}

}  // namespace
}  // namespace zero
