// `zero_bench tokenizer`: how fast text becomes tokens.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "apps/zero/options.h"
#include "benchmarks/programs/subjects.h"
#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/data/tokenizer.h"

namespace zero::app::benchmarks {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int tokenizer(const Arguments& arguments) {
  OptionParser parser("tokenizer",
                      "Encodes a text line by line on one thread, and as a whole on all of them.",
                      "zero_bench");
  std::string path;
  std::string file;
  int rounds = 3;
  parser.add_option("--tokenizer", path, "A tokenizer.json, or a folder with one")->required();
  parser.add_option("--text", file, "The text")->required()->type_name("FILE");
  parser.add_option("--rounds", rounds, "The best of so many is shown")->check(positive());
  if (const auto status = parser.read(arguments)) return *status;
  auto start = std::chrono::steady_clock::now();
  const auto tokenizer = Tokenizer::load(path);
  const double loaded = seconds_since(start);
  const auto text = read_file(file, &fail<DataError>);
  double lines = 1e30;
  double whole = 1e30;
  size_t tokens = 0;
  for (int round = 0; round < rounds; ++round) {
    tokens = 0;
    start = std::chrono::steady_clock::now();
    for (auto rest = std::string_view(text); !rest.empty();) {
      const auto line =
          rest.substr(0, rest.find('\n') == rest.npos ? rest.npos : rest.find('\n') + 1);
      rest.remove_prefix(line.size());
      tokens += tokenizer.encode(line).size();
    }
    lines = std::min(lines, seconds_since(start));
    start = std::chrono::steady_clock::now();
    tokenizer.encode([rest = std::string_view(text)]() mutable { return std::exchange(rest, {}); },
                     [](std::span<const uint32_t>) {});
    whole = std::min(whole, seconds_since(start));
  }
  const double megabytes = 1e-6 * static_cast<double>(text.size());
  fmt::print(
      "{}: loaded in {:.2f} s; {} tokens of {:.2f} MB; by lines {:.1f} MB/s, as a whole {:.1f} "
      "MB/s\n",
      path, loaded, tokens, megabytes, megabytes / lines, megabytes / whole);
  return 0;
}

}  // namespace zero::app::benchmarks
