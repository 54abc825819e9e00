#include "zero/data/tokenizers/decoders.h"

#include <charconv>
#include <optional>
#include <string_view>
#include <utility>

#include "zero/data/tokenizers/byte_characters.h"
#include "zero/data/tokenizers/characters.h"
#include "zero/data/tokenizers/fields.h"
#include "zero/data/tokenizers/regex.h"
#include "zero/data/utf8.h"

namespace zero::tokenizers {
namespace {

using Pieces = std::vector<std::string>;

std::string joined(const Pieces& pieces) {
  std::string text;
  for (const auto& piece : pieces) text += piece;
  return text;
}

void replace_all(std::string& text, std::string_view what, std::string_view by) {
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size()))
    text.replace(at, what.size(), by);
}

Pieces decode_bytes(const Pieces& pieces) {
  std::string bytes;
  for (const auto& piece : pieces) bytes += characters_to_bytes(piece).value_or(piece);
  return {with_replacements(bytes)};
}

// Returns the byte that a piece such as <0x0A> stands for.
std::optional<char> byte_of(std::string_view piece) {
  if (piece.size() != 6 || !piece.starts_with("<0x") || piece[5] != '>') return {};
  unsigned value = 0;
  const auto [end, error] = std::from_chars(piece.data() + 3, piece.data() + 5, value, 16);
  if (error != std::errc() || end != piece.data() + 5) return {};
  return static_cast<char>(value);
}

// Bytes that are no UTF-8 together become U+FFFD each.
Pieces join_byte_pieces(const Pieces& pieces) {
  Pieces out;
  std::string bytes;
  const auto flush = [&] {
    if (bytes.empty()) return;
    if (valid_utf8(bytes) == bytes.size()) {
      out.push_back(bytes);
    } else {
      out.insert(out.end(), bytes.size(), "\xEF\xBF\xBD");
    }
    bytes.clear();
  };
  for (const auto& piece : pieces) {
    if (const auto byte = byte_of(piece)) {
      bytes += *byte;
    } else {
      flush();
      out.push_back(piece);
    }
  }
  flush();
  return out;
}

Decoder metaspace_decoder(const Json& json) {
  const auto sign = required<std::string>(json, "replacement");
  const auto scheme = optional_member<std::string>(
      json, "prepend_scheme", optional_member(json, "add_prefix_space", true) ? "always" : "never");
  if (sign.empty()) unknown("replacement", sign);
  return [sign, drop = scheme != "never"](Pieces pieces) {
    for (size_t i = 0; i < pieces.size(); ++i)
      replace_all(pieces[i], sign, i == 0 && drop ? "" : " ");
    return pieces;
  };
}

Decoder word_piece_decoder(const Json& json) {
  constexpr std::pair<std::string_view, std::string_view> kCleaned[] = {
      {" .", "."},   {" ?", "?"},     {" !", "!"},    {" ,", ","},
      {" ' ", "'"},  {" n't", "n't"}, {" 'm", "'m"},  {" do not", " don't"},
      {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
  return [prefix = required<std::string>(json, "prefix"),
          clean = optional_member(json, "cleanup", true), kCleaned](Pieces pieces) {
    for (size_t i = 0; i < pieces.size(); ++i) {
      auto& piece = pieces[i];
      if (i > 0) {
        if (!prefix.empty() && piece.starts_with(prefix)) {
          piece.erase(0, prefix.size());
        } else {
          piece.insert(piece.begin(), ' ');
        }
      }
      for (const auto& [from, to] : kCleaned) {
        if (clean) replace_all(piece, from, to);
      }
    }
    return pieces;
  };
}

// Drops up to so many times a text from the ends of each piece.
Decoder strip_pieces(const Json& json) {
  const auto content = required<std::string>(json, "content");
  const auto start = required<uint64_t>(json, "start");
  const auto stop = required<uint64_t>(json, "stop");
  if (content.empty()) unknown("content", content);
  return [content, start, stop](Pieces pieces) {
    for (auto& piece : pieces) {
      for (uint64_t i = 0; i < start && piece.starts_with(content); ++i)
        piece.erase(0, content.size());
      for (uint64_t i = 0; i < stop && piece.ends_with(content); ++i)
        piece.resize(piece.size() - content.size());
    }
    return pieces;
  };
}

Decoder replace_in_pieces(const Json& json) {
  return [pattern = Pattern(member(json, "pattern")),
          content = required<std::string>(json, "content")](Pieces pieces) {
    for (auto& piece : pieces) {
      std::string out;
      size_t done = 0;
      pattern.each(piece, [&](size_t begin, size_t end) {
        out.append(piece, done, begin - done) += content;
        done = end;
      });
      piece = out.append(piece, done);
    }
    return pieces;
  };
}

}  // namespace

Decoder make_decoder(const nlohmann::json& json) {
  if (json.is_null()) {
    return [](Pieces pieces) {
      for (size_t i = 1; i < pieces.size(); ++i) pieces[i].insert(pieces[i].begin(), ' ');
      return pieces;
    };
  }
  const auto type = required<std::string>(json, "type");
  if (type == "Sequence") {
    std::vector<Decoder> all;
    for (const auto& each : required_array(json, "decoders")) all.push_back(make_decoder(each));
    return [all](Pieces pieces) {
      for (const auto& each : all) pieces = each(std::move(pieces));
      return pieces;
    };
  }
  if (type == "ByteLevel") return decode_bytes;
  if (type == "ByteFallback") return join_byte_pieces;
  if (type == "Fuse") return [](const Pieces& pieces) { return Pieces{joined(pieces)}; };
  if (type == "Metaspace") return metaspace_decoder(json);
  if (type == "WordPiece") return word_piece_decoder(json);
  if (type == "Strip") return strip_pieces(json);
  if (type == "Replace") return replace_in_pieces(json);
  unknown("decoder", type);
}

}  // namespace zero::tokenizers
