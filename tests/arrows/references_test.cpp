// Files and sections that comments, messages and documents name exist: a reader who follows one is not sent
// nowhere.
#include <gtest/gtest.h>

#include <cctype>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "support/places.h"
#include "support/temp_folder.h"

namespace sherd::testing {
namespace {

namespace fs = std::filesystem;

/// Every file of the project, from its root; what is built, hidden or only quoted in tests/arrows is none.
std::vector<std::string> project_files(const fs::path& root) {
  std::vector<std::string> out;
  for (auto at = fs::recursive_directory_iterator(root); at != fs::recursive_directory_iterator(); ++at) {
    const std::string path = fs::relative(at->path(), root).generic_string();
    if (at->is_directory() && (path[0] == '.' || path.starts_with("build") || path == "tests/arrows"))
      at.disable_recursion_pending();
    else if (at->is_regular_file())
      out.push_back(path);
  }
  return out;
}

/// Lines without their #include, whose paths the compiler finds.
std::string prose_of(const fs::path& file) {
  std::ifstream in(file);
  std::string out, line;
  while (std::getline(in, line))
    if (line.find("#include") == std::string::npos) out += line + "\n";
  return out;
}

/// One line per mention of a file, or of a section of one, that is not there: "file: mention".
std::vector<std::string> dead_references(const fs::path& root) {
  static const std::regex path(R"([A-Za-z_0-9]+(/[A-Za-z_0-9]+)+\.(h|cpp|cu|cuh|py|sh|md|json)\b)");
  static const std::regex section(R"re((README|[a-z]+/[a-z_]+)(\.md)?, \\?"([^"\\]+)\\?")re");
  const std::vector<std::string> files = project_files(root);
  std::set<std::string> known,
      folders;  // every end of a path that begins with a folder or file; the names of folders
  for (const std::string& file : files)
    for (std::size_t at = 0; at != std::string::npos;) {
      const std::size_t slash = file.find('/', at);
      known.insert(file.substr(at));
      if (slash != std::string::npos) folders.insert(file.substr(at, slash - at));
      at = slash == std::string::npos ? slash : slash + 1;
    }
  std::vector<std::string> dead;
  for (const std::string& file : files) {
    static const std::set<std::string> read{".h",     ".cpp", ".cu", ".cuh", ".md",
                                            ".cmake", ".py",  ".sh", ".txt", ".in"};
    if (!read.contains(fs::path(file).extension().string()) || file.ends_with(".json")) continue;
    const std::string text = prose_of(root / file);
    for (std::sregex_iterator m(text.begin(), text.end(), path), end; m != end; ++m) {
      if (!folders.contains(m->str().substr(0, m->str().find('/')))) continue;  // another project's
      const auto before = m->position() == 0 ? ' ' : text[static_cast<std::size_t>(m->position()) - 1];
      // After these it is a path of the user's, or of another program's.
      if (std::string("/.}$<~-").find(before) != std::string::npos || known.contains(m->str())) continue;
      dead.push_back(file + ": " + m->str());
    }
    for (std::sregex_iterator m(text.begin(), text.end(), section), end; m != end; ++m) {
      const std::string document = (*m)[1].str() + ".md";
      if (!known.contains(document)) continue;
      std::stringstream whole;
      whole << std::ifstream(root / document).rdbuf();
      // A heading, numbered or not, or the bold beginning of a numbered idea.
      const std::string title = (*m)[3].str(), body = whole.str();
      const std::size_t at = body.find(title);
      if (at == std::string::npos) dead.push_back(file + ": " + m->str());
    }
  }
  return dead;
}

/// The end of links to a heading: its letters, digits and hyphens, small, with hyphens for spaces.
std::string anchor_of(const std::string& heading) {
  std::string out;
  for (const char c : heading)
    if (const auto byte = static_cast<unsigned char>(c); byte == ' ')
      out += '-';
    else if (std::isalnum(byte) || byte > 127 || byte == '_' || byte == '-')
      out += static_cast<char>(std::tolower(byte));
  return out;
}

/// "file: link" for each link of a document to a document, or a heading of one, that is not there.
std::vector<std::string> dead_links(const fs::path& root) {
  static const std::regex link(R"(\]\(([A-Za-z_/.]*\.md)?(#([^)]*))?\))"), heading(R"((^|\n)#+ ([^\n]*))");
  std::vector<std::string> dead;
  for (const std::string& file : project_files(root)) {
    if (!file.ends_with(".md")) continue;
    const std::string text = prose_of(root / file);
    for (std::sregex_iterator m(text.begin(), text.end(), link), end; m != end; ++m) {
      const fs::path target =
          (*m)[1].length() == 0 ? root / file : (root / file).parent_path() / (*m)[1].str();
      bool found = fs::exists(target) && !(*m)[3].matched;
      const std::string there = fs::exists(target) ? prose_of(target) : "";
      for (std::sregex_iterator h(there.begin(), there.end(), heading); !found && h != end; ++h)
        found = anchor_of((*h)[2].str()) == (*m)[3].str();
      if (!found) dead.push_back(file + ": " + m->str());
    }
  }
  return dead;
}

TEST(References, LinksLeadToHeadings) {
  for (const std::string& dead : dead_links(SHERD_SOURCE_DIR)) ADD_FAILURE() << dead;
}

TEST(References, DeadLinksAreFound) {
  TempFolder root;
  fs::create_directories(root / "docs");
  write_text(root / "README.md", "## It is `there`, now\n[a](docs/b.md), [c](#it-is-there-now)\n");
  write_text(root / "docs/b.md", "# `model.moe`\n[d](../README.md#it-is-there-now), [e](b.md#modelmoe)\n");
  EXPECT_TRUE(dead_links(root.path()).empty());
  write_text(root / "docs/b.md", "# B\n[d](../README.md#it-is-gone), [e](c.md)\n");
  EXPECT_EQ(dead_links(root.path()),
            (std::vector<std::string>{"docs/b.md: ](../README.md#it-is-gone)", "docs/b.md: ](c.md)"}));
}

TEST(References, LeadToFilesAndSectionsThatExist) {
  EXPECT_GT(project_files(SHERD_SOURCE_DIR).size(), 300u)
      << "the project was not found under " << SHERD_SOURCE_DIR;
  for (const std::string& dead : dead_references(SHERD_SOURCE_DIR)) ADD_FAILURE() << dead;
}

TEST(References, DeadOnesAreFound) {
  TempFolder root;
  fs::create_directories(root / "src/base");
  write_text(root / "README.md", "## There\nsee src/base/here.h\n");
  write_text(root / "src/base/here.h",
             "// README, \"There\"; base/here.h; /etc/some/file.h\n#include \"x/y.h\"\n");
  EXPECT_TRUE(dead_references(root.path()).empty());
  write_text(root / "src/base/here.h", "// README, \"Gone\"; base/gone.h\n");
  EXPECT_EQ(dead_references(root.path()),
            (std::vector<std::string>{"src/base/here.h: base/gone.h", "src/base/here.h: README, \"Gone\""}));
}

}  // namespace
}  // namespace sherd::testing
