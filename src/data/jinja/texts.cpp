#include "data/jinja/texts.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "data/hugging_face/steps/unicode.h"

namespace sherd::data::jinja {

const std::string& text_of(const Value& value, const char* what) {
  if (!value.is_string()) template_error(cat(what, " takes a string, not ", value.kind()));
  return value.text();
}

std::string stripped(std::string_view text, const Value* which, bool front, bool back) {
  const std::vector<std::string_view> all = characters(text);
  std::vector<std::string_view> taken;
  const bool given = which && which->is_string();
  if (given) taken = characters(which->text());
  const auto goes = [&](std::string_view c) {
    if (given) return std::find(taken.begin(), taken.end(), c) != taken.end();
    std::string storage;
    return is_python_space(first_character(valid_utf8(c, storage)));
  };
  std::size_t begin = 0, end = all.size();
  while (front && begin < end && goes(all[begin])) ++begin;
  while (back && end > begin && goes(all[end - 1])) --end;
  std::string out;
  for (std::size_t i = begin; i < end; ++i) out += all[i];
  return out;
}

std::string replaced(const std::string& text, const std::string& from, const std::string& to,
                     std::int64_t most) {
  std::string out;
  if (from.empty()) {
    std::int64_t done = 0;
    for (const std::string_view c : characters(text)) {
      if (most < 0 || done++ < most) out += to;
      out += c;
    }
    return most < 0 || done < most ? out + to : out;
  }
  std::size_t at = 0;
  for (std::int64_t n = 0; most < 0 || n < most; ++n) {
    const std::size_t found = text.find(from, at);
    if (found == std::string::npos) break;
    out.append(text, at, found - at).append(to);
    at = found + from.size();
  }
  return out.append(text, at, std::string::npos);
}

std::string lower(std::string_view text) {
  std::string out, storage;
  for (const std::string_view c : characters(valid_utf8(text, storage)))
    append_lower(first_character(c), out);
  return out;
}

std::string upper(std::string_view text) {
  std::string out, storage;
  for (const std::string_view c : characters(valid_utf8(text, storage)))
    append_upper(first_character(c), out);
  return out;
}

std::string titled(std::string_view text, bool once) {
  std::string out, storage;
  bool begins = true;
  for (const std::string_view c : characters(valid_utf8(text, storage))) {
    const char32_t character = first_character(c);
    const bool letter = lower(c) != upper(c);
    if (begins && (letter || once))
      append_upper(character, out);
    else
      append_lower(character, out);
    begins = once ? false : !letter;
  }
  return out;
}

std::string joined(const Value& value, const std::string& by) {
  std::string out;
  bool first = true;
  for (const Value& item : value.items()) out += std::exchange(first, false) ? item.str() : by + item.str();
  return out;
}

std::int64_t limit_of(Arguments& arguments, const char* name) {
  const Value* most = arguments.take(name);
  return most ? most->integer() : -1;
}

namespace {

List split(const std::string& text, const Value* separator, std::int64_t most, bool from_end) {
  List out;
  const bool by_space = !separator || separator->is_none();
  if (!by_space && text_of(*separator, "split()").empty())
    template_error("split() takes a separator, not ''");
  std::vector<std::string> parts;
  if (by_space) {
    std::string part;
    const std::vector<std::string_view> all = characters(text);
    for (std::size_t i = 0; i < all.size(); ++i) {
      std::string storage;
      const bool space = is_python_space(first_character(valid_utf8(all[i], storage)));
      if (!space && part.empty() && most >= 0 && static_cast<std::int64_t>(parts.size()) == most) {
        for (; i < all.size(); ++i) part += all[i];
        break;
      }
      if (!space)
        part += all[i];
      else if (!part.empty())
        parts.push_back(std::exchange(part, {}));
    }
    if (!part.empty()) parts.push_back(part);
  } else {
    const std::string& by = separator->text();
    std::string rest = text;
    for (std::int64_t n = 0; most < 0 || n < most; ++n) {
      const std::size_t at = from_end ? rest.rfind(by) : rest.find(by);
      if (at == std::string::npos) break;
      if (from_end) {
        parts.insert(parts.begin(), rest.substr(at + by.size()));
        rest.resize(at);
      } else {
        parts.push_back(rest.substr(0, at));
        rest.erase(0, at + by.size());
      }
    }
    parts.insert(from_end ? parts.begin() : parts.end(), rest);
  }
  for (std::string& part : parts) out.emplace_back(std::move(part));
  return out;
}

List lines(const std::string& text, bool keep_ends) {
  List out;
  std::string line;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c != '\n' && c != '\r') {
      line += c;
      continue;
    }
    std::string end(1, c);
    if (c == '\r' && i + 1 < text.size() && text[i + 1] == '\n') end += text[++i];
    out.emplace_back(keep_ends ? line + end : line);
    line.clear();
  }
  if (!line.empty()) out.emplace_back(line);
  return out;
}

bool ends_so(const std::string& text, const Value& with, bool front) {
  if (with.is_list()) {
    const List& all = with.sequence().items;
    return std::any_of(all.begin(), all.end(), [&](const Value& one) { return ends_so(text, one, front); });
  }
  return front ? text.starts_with(text_of(with, "startswith()"))
               : text.ends_with(text_of(with, "endswith()"));
}

/// The place of a byte in characters.
std::int64_t place_in(const std::string& text, std::size_t byte) {
  return static_cast<std::int64_t>(characters(std::string_view(text).substr(0, byte)).size());
}

/// Whether there are characters, and each is of the kind.
bool all_are(const std::string& text, bool (*kind)(std::string_view)) {
  const auto all = characters(text);
  return !all.empty() && std::all_of(all.begin(), all.end(), kind);
}

bool is_digit_text(std::string_view c) {
  return c.size() == 1 && c[0] >= '0' && c[0] <= '9';
}

bool is_letter_text(std::string_view c) {
  std::string storage;
  const char32_t character = first_character(valid_utf8(c, storage));
  return is_word(character) && !is_digit_text(c) && c != "_" && !is_mark(character);
}

/// '{} {name}'.format(…), without what stands behind colons.
std::string formatted(const std::string& text, Arguments& arguments) {
  const List positional = arguments.rest();
  const auto named = arguments.rest_by_name();
  std::string out;
  std::size_t next = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if ((c == '{' || c == '}') && i + 1 < text.size() && text[i + 1] == c) {
      out += c, ++i;
      continue;
    }
    if (c != '{') {
      out += c;
      continue;
    }
    const std::size_t end = text.find('}', i);
    if (end == std::string::npos) template_error("format() finds a '{' without '}'");
    const std::string key = text.substr(i + 1, end - i - 1);
    const bool number = !key.empty() && key.find_first_not_of("0123456789") == std::string::npos;
    const auto found =
        std::find_if(named.begin(), named.end(), [&](const auto& of) { return of.first == key; });
    const std::size_t at = key.empty() ? next++ : number ? std::stoul(key) : positional.size();
    if ((key.empty() || number) ? at >= positional.size() : found == named.end())
      template_error(cat("format() has no value for '{", excerpt(key, 40), "}'"));
    out += key.empty() || number ? positional[at].str() : found->second.str();
    i = end;
  }
  return out;
}

using TextMethod = Value (*)(const std::string& text, Arguments& arguments);

const std::map<std::string, TextMethod>& text_methods() {
  using T = const std::string&;
  using A = Arguments&;
  static const std::map<std::string, TextMethod> methods{
      {"strip", [](T t, A a) { return Value(stripped(t, a.take("chars"), true, true)); }},
      {"lstrip", [](T t, A a) { return Value(stripped(t, a.take("chars"), true, false)); }},
      {"rstrip", [](T t, A a) { return Value(stripped(t, a.take("chars"), false, true)); }},
      {"lower", [](T t, A) { return Value(lower(t)); }},
      {"casefold", [](T t, A) { return Value(lower(t)); }},
      {"upper", [](T t, A) { return Value(upper(t)); }},
      {"title", [](T t, A) { return Value(titled(t, false)); }},
      {"capitalize", [](T t, A) { return Value(titled(t, true)); }},
      {"startswith", [](T t, A a) { return Value(ends_so(t, a.require("prefix"), true)); }},
      {"endswith", [](T t, A a) { return Value(ends_so(t, a.require("suffix"), false)); }},
      {"removeprefix",
       [](T t, A a) {
         const std::string& front = text_of(a.require("prefix"), "removeprefix()");
         return Value(t.starts_with(front) ? t.substr(front.size()) : t);
       }},
      {"removesuffix",
       [](T t, A a) {
         const std::string& back = text_of(a.require("suffix"), "removesuffix()");
         return Value(!back.empty() && t.ends_with(back) ? t.substr(0, t.size() - back.size()) : t);
       }},
      {"split",
       [](T t, A a) {
         const Value* by = a.take("sep");
         return Value::list(split(t, by, limit_of(a, "maxsplit"), false));
       }},
      {"rsplit",
       [](T t, A a) {
         const Value* by = a.take("sep");
         return Value::list(split(t, by, limit_of(a, "maxsplit"), true));
       }},
      {"splitlines",
       [](T t, A a) {
         const Value* keep = a.take("keepends");
         return Value::list(lines(t, keep && keep->is_true()));
       }},
      {"replace",
       [](T t, A a) {
         const std::string from = text_of(a.require("old"), "replace()"),
                           to = text_of(a.require("new"), "replace()");
         return Value(replaced(t, from, to, limit_of(a, "count")));
       }},
      {"find",
       [](T t, A a) {
         const std::size_t at = t.find(text_of(a.require("sub"), "find()"));
         return Value(at == std::string::npos ? std::int64_t{-1} : place_in(t, at));
       }},
      {"rfind",
       [](T t, A a) {
         const std::size_t at = t.rfind(text_of(a.require("sub"), "rfind()"));
         return Value(at == std::string::npos ? std::int64_t{-1} : place_in(t, at));
       }},
      {"index",
       [](T t, A a) {
         const std::size_t at = t.find(text_of(a.require("sub"), "index()"));
         if (at == std::string::npos) template_error("index() finds no such text");
         return Value(place_in(t, at));
       }},
      {"count",
       [](T t, A a) {
         const std::string& part = text_of(a.require("sub"), "count()");
         if (part.empty()) return Value(static_cast<std::int64_t>(characters(t).size()) + 1);
         std::int64_t n = 0;
         for (std::size_t at = t.find(part); at != std::string::npos; at = t.find(part, at + part.size()))
           ++n;
         return Value(n);
       }},
      {"join", [](T t, A a) { return Value(joined(a.require("iterable"), t)); }},
      {"format", [](T t, A a) { return Value(formatted(t, a)); }},
      {"isdigit", [](T t, A) { return Value(all_are(t, is_digit_text)); }},
      {"isnumeric", [](T t, A) { return Value(all_are(t, is_digit_text)); }},
      {"isalpha", [](T t, A) { return Value(all_are(t, is_letter_text)); }},
      {"isalnum",
       [](T t, A) {
         return Value(all_are(t, [](std::string_view c) { return is_digit_text(c) || is_letter_text(c); }));
       }},
      {"isspace", [](T t, A) { return Value(!t.empty() && stripped(t, nullptr, true, true).empty()); }},
      {"isupper", [](T t, A) { return Value(t == upper(t) && t != lower(t)); }},
      {"islower", [](T t, A) { return Value(t == lower(t) && t != upper(t)); }}};
  return methods;
}

}  // namespace

Value text_method(const std::string& text, const std::string& name) {
  const auto found = text_methods().find(name);
  if (found == text_methods().end()) return {};
  return Value::function([text, name, run = found->second](Arguments& arguments) {
    Value out = run(text, arguments);
    arguments.done(name + "()");
    return out;
  });
}

}  // namespace sherd::data::jinja
