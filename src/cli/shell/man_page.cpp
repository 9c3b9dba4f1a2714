#include "cli/shell/shell_files.h"

#include <algorithm>
#include <cctype>
#include <cstdio>

#include "base/error.h"
#include "base/text/utf8.h"
#include "base/version.h"
#include "cli/shell/declared.h"

namespace sherd::cli {
namespace {

std::uint32_t code_point(std::string_view character) {
  if (character.size() == 1) return static_cast<unsigned char>(character[0]);
  std::uint32_t out = static_cast<unsigned char>(character[0]) & (0x7Fu >> character.size());
  for (const char c : character.substr(1)) out = out << 6 | (static_cast<unsigned char>(c) & 0x3F);
  return out;
}

/// Text as roff has it, on a line of its own.
std::string roff(std::string_view text) {
  std::string out = text.starts_with('.') ? "\\&" : "";
  for (std::size_t at = 0, length = 0; at < text.size(); at += length) {
    length = std::max<std::size_t>(1, utf8_length(text.substr(at)));
    const char c = text[at];
    char escape[16];
    switch (c) {
      case '\\':
        out += "\\e";
        break;
      case '-':
        out += "\\-";
        break;
      case '\'':
        out += "\\(aq";
        break;
      case '`':
        out += "\\(ga";
        break;
      case '^':
        out += "\\(ha";
        break;
      case '~':
        out += "\\(ti";
        break;
      default:
        std::snprintf(escape, sizeof escape, "\\[u%04X]", code_point(text.substr(at, length)));
        out += length == 1 ? std::string(1, c) : escape;
    }
  }
  return out;
}

std::string page_name(const std::string& path) {
  std::string out = path.empty() ? "sherd" : "sherd-" + path;
  std::replace(out.begin(), out.end(), ' ', '-');
  return out;
}

std::string heading(const std::string& name, const std::string& summary) {
  std::string upper = name;
  std::transform(upper.begin(), upper.end(), upper.begin(), [](unsigned char c) { return std::toupper(c); });
  return cat(".TH ", roff(upper), " 1 \"\" \"Sherd ", version(), "\" \"Sherd\"\n.SH NAME\n", roff(name),
             " \\- ", roff(summary), "\n");
}

/// An entry of a list: a term, as roff, and text.
std::string entry(const std::string& term, const std::string& text) {
  return cat(".TP\n", term, "\n", roff(text), "\n");
}

std::string bold(const std::string& text) {
  return "\\fB" + roff(text) + "\\fR";
}

std::string commands_section(std::span<const Command> commands) {
  std::string out = ".SH COMMANDS\n";
  for (const Command& command : commands) out += entry(bold(command.name), cat(command.summary, "."));
  return out;
}

std::string options_section(const CommandLine& line) {
  std::string out = ".SH OPTIONS\n";
  for (const Option& option : line.options()) {
    std::string text = option.help + ".";
    if (option.name == line.rest()) text += " The option's name may be left out.";
    if (option.kind == Option::Kind::list) text += " May be given several times.";
    if (!option.fallback.empty()) text += cat(" Default: ", option.fallback);
    const std::string letter = option.name == "help" ? bold("-h") + ", " : "";
    out += entry(cat(letter, bold("--" + option.name),
                     option.shown.empty() ? "" : " \\fI" + roff(option.shown) + "\\fR"),
                 text);
  }
  return out;
}

std::string see_also(const std::string& other) {
  return cat(".SH SEE ALSO\n", bold(other), "(1)\n");
}

std::string page_of(const Declared& each) {
  const std::string& path = each.path();
  return cat(heading(page_name(path), each.command->summary), ".SH SYNOPSIS\n", bold("sherd " + path), "\n",
             roff(each.line.synopsis()), "\n.SH DESCRIPTION\n", roff(each.line.summary()), "\n",
             each.is_group() ? commands_section(each.command->commands()) : options_section(each.line),
             see_also(each.is_first() ? "sherd" : page_name(path.substr(0, path.rfind(' ')))));
}

std::string main_page() {
  std::string out =
      cat(heading("sherd", "trains transformers sharded over ranks"), ".SH SYNOPSIS\n", bold("sherd"),
          " \\fICOMMAND\\fR ...\n.SH DESCRIPTION\n",
          roff("Each command has a page of its own, as sherd-train(1), and lists its options with "
               "--help."),
          "\n", commands_section(all_commands()), ".SH EXIT STATUS\n");
  const std::pair<std::string, const char*> codes[] = {
      {"0", "It did what it was asked."},
      {"1", "An error."},
      {cat(wrong_use), "A wrong command line or configuration, with which the same command would end again."},
      {cat(does_not_fit), "From estimate, plan and tune: nothing fits."},
      {cat(lost_others), "A rank ended because another one has, or does not come."},
      {cat(does_not_agree), "From verify: a run does not agree, or not all of it can be checked."},
      {cat(stopped_by(0), "+N"), "Signal N stopped it."}};
  for (const auto& [code, meaning] : codes) out += entry(code, meaning);
  out += ".SH ENVIRONMENT\n";
  out += entry(bold("NO_COLOR"), "Where it is set and not empty, nothing has colours.");
  out += entry(bold("TERM"),
               "Where it is dumb or not set, no bar of progress is drawn, and nothing has colours.");
  return out;
}

}  // namespace

std::map<std::string, std::string> man_pages() {
  std::map<std::string, std::string> out{{"sherd.1", main_page()}};
  for (const Declared& each : declared_commands()) out[page_name(each.path()) + ".1"] = page_of(each);
  return out;
}

}  // namespace sherd::cli
