#pragma once

#include <memory>
#include <string>
#include <vector>

#include "data/prepare.h"
#include "data/text/labelled_example.h"
#include "data/tokenizer.h"

namespace sherd::data {

/// How lines with labels are read.
LabelledOptions labelled_options(const PrepareOptions& options);

/// A tokenizer and, where it is of a file, that file's bytes, to be stored beside the dataset.
struct ChosenTokenizer {
  std::shared_ptr<const Tokenizer> tokenizer;  // names the file as it will be stored
  std::string model;
};

/// The tokenizer that PrepareOptions::tokenizer names, or one that is trained on a sample of the files.
/// Throws as prepare().
ChosenTokenizer choose_tokenizer(const PrepareOptions& options, const std::vector<InputFile>& files);

}  // namespace sherd::data
