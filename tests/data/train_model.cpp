// Trains a sentencepiece model as others do, with sentencepiece's own defaults:
//   train_model TEXT PREFIX [KEY=VALUE ...]     writes PREFIX.model
// Without LibTorch: see apps/sentencepiece/main.cpp.
#include <sentencepiece_trainer.h>

#include <iostream>
#include <string>
#include <unordered_map>

int main(int count, char** arguments) {
  std::unordered_map<std::string, std::string> options{
      {"input", arguments[1]}, {"model_prefix", arguments[2]}, {"minloglevel", "2"}};
  for (int i = 3; i < count; ++i) {
    const std::string option = arguments[i];
    const auto equals = option.find('=');
    options[option.substr(0, equals)] = option.substr(equals + 1);
  }
  const auto status = sentencepiece::SentencePieceTrainer::Train(options);
  if (!status.ok()) std::cerr << status.ToString() << "\n";
  return status.ok() ? 0 : 1;
}
