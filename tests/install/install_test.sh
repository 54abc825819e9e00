#!/usr/bin/env bash
# Installs libzero, moves the installed folder, builds examples/train_my_module against it outside the tree, and runs it on 2 ranks.
#   install_test.sh SOURCE_FOLDER BUILD_FOLDER [CMAKE ARGUMENT ...]
set -euo pipefail
source=$1 build=$2
shift 2
unset LIBTORCH_ROOT CMAKE_PREFIX_PATH # the package must know by itself
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "FAILED: $*"
  exit 1
}

cmake --install "$build" --prefix "$work/first" >/dev/null
mv "$work/first" "$work/moved"
if grep -rnE '#include [<"](fmt|nlohmann|CLI)/' "$work/moved/include"; then fail "public headers include private dependencies"; fi
if grep -rnF -e "$source" -e "$build" "$work/moved" --include='*.cmake'; then fail "the package names the build's folders"; fi

cp -r "$source/examples/train_my_module" "$work/example"
(cd "$work/moved/include" && find . -name '*.h' | sort | sed 's/\(.*\)/#include "\1"/') >"$work/example/headers.cpp" # each compiles elsewhere
cat >"$work/example/uses.cpp" <<'END' # headers that documents name beside the umbrella, and what it must complete
#include <zero/data/chat_template.h>
#include <zero/data/example.h>
#include <zero/data/labelled_text.h>
#include <zero/models/language/generate.h>
#include <zero/report/run_report.h>
#include <zero/train/generate_texts.h>
#include <zero/train/loaded_model.h>
#include <zero/zero.h>

std::string chat(const zero::ChatTemplate& chat) { return chat.text(R"([{"role": "user", "content": "Q"}])", true); }
zero::Example example(std::string_view line) { return zero::read_example(line, zero::ChatTemplate("{{ messages[0].content }}", "here")); }
zero::LabelledText labelled(std::string_view line) { return zero::read_labelled(line); }
at::Tensor next(zero::LanguageModel& model, const at::Tensor& tokens) {
  zero::KeyValueCache cache;
  return model.logits_next(tokens, cache);
}
auto text(zero::LanguageModel& model, const std::vector<int64_t>& tokens) { return zero::generate(tokens, zero::cached_logits(model), {}); }
auto texts(zero::train::LoadedModel& loaded, const std::vector<std::vector<int64_t>>& prompts) {
  return zero::train::generate_texts(loaded.engine(), loaded.model(), prompts, {});
}
void report(const std::string& run) { zero::report::write_report("report.html", zero::report::report({zero::report::read_log(run)})); }
struct Layer : torch::nn::Module {
  Layer() { linear = register_module("linear", zero::Projection(zero::ProjectionOptions{.in = 3, .out = 2})); }
  zero::Projection linear{nullptr};
};
auto adapted(Layer& layer) { return zero::add_lora(layer, {.rank = 2, .targets = {.all_linear = true}}); }
END
echo 'target_sources(train_my_module PRIVATE headers.cpp uses.cpp)' >>"$work/example/CMakeLists.txt"
cmake -S "$work/example" -B "$work/example/build" -DCMAKE_PREFIX_PATH="$work/moved" "$@" >/dev/null
cmake --build "$work/example/build"

cd "$work"
train() { # STAGE: trains on 2 ranks, keeps what it printed and the states
  moved/bin/zero launch -n 2 --logs rank0 -- example/build/train_my_module "$1" >"stage$1.log"
  LC_ALL=C sed '1s/"stage":"[0-3]"/"stage":"-"/' my_module.safetensors >"stage$1.safetensors" # the header says the stage
}
train 0
train 3
cat stage3.log
cmp stage0.log stage3.log || fail "stage 3 printed other losses than stage 0"
cmp stage0.safetensors stage3.safetensors || fail "stage 3 gives other states than stage 0"
awk '/^step 500 loss / && $4 < 0.1 {learnt = 1} END {exit !learnt}' stage3.log || fail "the loss did not fall below 0.1"
for stage in 0 1 2 3; do # with two micro-batches a step stages 0 and 1 add in one order, and 2 and 3 in another
  moved/bin/zero launch -n 2 --logs rank0 -- example/build/plain_zero $stage >"plain$stage.log"
done
cmp plain0.log plain1.log || fail "plain_zero at stage 1 printed other losses than at stage 0"
cmp plain2.log plain3.log || fail "plain_zero at stage 3 printed other losses than at stage 2"
[[ $(wc -l <plain0.log) == 4 ]] || fail "plain_zero: $(cat plain0.log)"
example/build/train_my_module 2 >alone.log || fail "without a launcher"
[[ $(wc -l <alone.log) == 5 ]] || fail "without a launcher: $(cat alone.log)"
