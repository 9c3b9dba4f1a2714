// Time per generated token beside the time that reading the model's weights once takes, and beside reading
// the text afresh for each token. Random weights; prints one JSON object.
#include <algorithm>
#include <cstdio>
#include <functional>

#include "autograd/key_cache.h"
#include "base/error.h"
#include "bench/programs/options.h"
#include "bench/programs/serving.h"
#include "bench/suite/rounds.h"
#include "models/inference/generate.h"
#include "support/plain_parameters.h"
#include "tensor/formats/stored_format.h"

namespace {

using namespace sherd;

struct GenerateSettings {
  std::string mode = "bf16", style = "gpt2", base = "compute";
  int threads = 2, tokens = 128, rounds = 5, heads = 12;
  std::int64_t batch = 1, prompt = 32, seq = 1024, layers = 12, hidden = 768, vocab = 50257, afresh = 3;
};

GenerateSettings parse(int argc, char** argv) {
  GenerateSettings s;
  bench::Options(
      "bench_generate",
      "[--mode fp32|bf16] [--style gpt2|llama] [--base compute|nf4|…] [--threads 2] [--batch 1]\n"
      "  [--prompt 32] [--tokens 128]"
      "  [--rounds 5] [--seq 1024] [--layers 12] [--hidden 768] [--heads 12] [--vocab 50257] [--afresh 3]\n"
      "  (rounds alternate reading and generating; afresh: tokens that are read afresh at the text's end)")
      .value("mode", s.mode)
      .value("style", s.style)
      .value("base", s.base)
      .value("threads", s.threads)
      .value("batch", s.batch)
      .value("prompt", s.prompt)
      .value("tokens", s.tokens)
      .value("rounds", s.rounds)
      .value("seq", s.seq)
      .value("layers", s.layers)
      .value("hidden", s.hidden)
      .value("heads", s.heads)
      .value("vocab", s.vocab)
      .value("afresh", s.afresh)
      .parse(argc, argv);
  require(parse_dtype(s.mode).has_value() && s.tokens > 1 && s.rounds > 0 && s.prompt > 0 && s.batch > 0,
          "--mode must be fp32 or bf16, and --tokens above 1");
  require(tensor::parse_stored_format(s.base).has_value(), "--base must be a format of weights");
  return s;
}

/// As parameters are kept, in few bits or not.
const tensor::Tensor& kept(const autograd::Parameter& p) {
  return p.in_blocks.blocks.defined() ? p.in_blocks.blocks : p.value;
}

/// Puts the linear layers' weights into blocks.
void put_into_blocks(const std::vector<nn::ParameterPtr>& parameters, StoredFormat format,
                     tensor::Kernels& kernels) {
  for (const auto& p : parameters) {
    if (!p->in_linear) continue;
    device::Device& device = kernels.device();
    const auto values = tensor::Tensor::empty(device, p->shape, DType::f32);
    kernels.copy(p->value, values);
    p->stored_as = format;
    p->in_blocks = {tensor::Tensor::empty(device, {tensor::stored_bytes(format, p->numel())}, DType::u8),
                    p->value.dtype()};
    require(tensor::quantize(format, {values.data<float>(), static_cast<std::size_t>(p->numel())},
                             p->in_blocks.blocks.raw(), device.arena()),
            "initial values are finite");
    p->value = {};
  }
}

/// Every word of every parameter, by all threads: as fast as memory gives them.
class WeightReader {
 public:
  explicit WeightReader(device::Device& device) : device_(device) {}
  void read(const std::vector<nn::ParameterPtr>& parameters) {
    for (const auto& p : parameters) {
      const auto words = static_cast<std::int64_t>(kept(*p).bytes() / 8);
      const auto* from = reinterpret_cast<const std::uint64_t*>(kept(*p).raw());
      device_.arena().parallel_for(words, std::max<std::int64_t>(4096, words / 16),
                                   [&](std::int64_t begin, std::int64_t end) {
                                     std::uint64_t sum[8] = {};
                                     std::int64_t i = begin;
                                     for (; i + 8 <= end; i += 8)
                                       for (int k = 0; k < 8; ++k) sum[k] += from[i + k];
                                     for (int k = 0; k < 8; ++k) seen_ = seen_ + sum[k];
                                   });
    }
  }

 private:
  device::Device& device_;
  volatile std::uint64_t seen_ = 0;
};

void run(const GenerateSettings& s) {
  models::GptConfig o = s.style == "llama" ? models::GptConfig::of_family("llama") : models::GptConfig();
  o.vocab_size = s.vocab, o.seq_length = s.seq, o.hidden_size = s.hidden, o.num_layers = s.layers;
  o.num_heads = s.heads;
  test::Cpu cpu(s.threads);
  models::Gpt model(o);
  for (const auto& p : model.parameters()) p->trainable = false;
  const test::PlainParameters parameters(*cpu.kernels, model, *parse_dtype(s.mode));
  if (const StoredFormat format = *tensor::parse_stored_format(s.base); format != StoredFormat::compute)
    put_into_blocks(parameters.all(), format, *cpu.kernels);
  autograd::Tape tape(*cpu.kernels);
  tape.training = false;
  const models::RunPass pass = [&](const std::function<void(autograd::Tape&)>& body) { body(tape); };
  std::vector<models::TextRequest> texts(static_cast<std::size_t>(s.batch));
  std::int32_t id = 1;
  for (models::TextRequest& text : texts) {
    for (std::int64_t i = 0; i < s.prompt; ++i) text.prompt.push_back(id = (id * 17 + 3) % 1000);
    text.max_tokens = s.tokens;
  }
  WeightReader reader(*cpu.device);
  std::vector<double> reads, decodes;
  models::GenerationStats stats;
  for (int round = -1; round < s.rounds; ++round) {
    const double read = bench::seconds_of([&] { reader.read(parameters.all()); }) * 1e3;
    stats = models::generate_texts(model, pass, texts, s.batch, {.temperature = 0.8, .top_k = 40},
                                   [](std::size_t, std::int32_t) { return true; });
    if (round < 0) continue;  // first touches
    reads.push_back(read);
    decodes.push_back(stats.decode_seconds * 1e3 / static_cast<double>(stats.decode_passes));
  }
  // As without a cache: the whole text for each token.
  const std::int64_t whole = std::min(s.seq, s.prompt + s.tokens);
  const tensor::Tensor text = cpu.ids({s.batch, whole}, 3, 1000);
  std::vector<double> afresh;
  autograd::Tape::NoGrad no_grad(tape);
  for (std::int64_t i = 0; i <= s.afresh && s.afresh > 0; ++i)
    afresh.push_back(bench::seconds_of([&] {
                       autograd::KeyCache cache(s.batch, whole);
                       tape.key_cache = &cache;
                       std::vector<autograd::KeyCache::Rows> rows;
                       for (std::int64_t b = 0; b < s.batch; ++b) rows.push_back({b, 0, whole});
                       cache.begin(*cpu.device, rows, whole);
                       (void)model.next_logits(tape, text);
                       tape.key_cache = nullptr;
                     }) *
                     1e3);
  std::size_t bytes = 0;
  for (const auto& p : parameters.all()) bytes += kept(*p).bytes();
  const double read = bench::median(reads), decode = bench::median(decodes);
  std::printf(
      "{\"bench\": \"generate\", \"mode\": \"%s\", \"style\": \"%s\", \"base\": \"%s\", \"threads\": %d, "
      "\"batch\": %lld, "
      "\"prompt\": %lld, \"tokens\": %d,\n \"weights_mib\": %.1f, \"cache_mib\": %.1f, "
      "\"read_ms\": %.3f, \"read_gb_per_s\": %.1f,\n \"ms_per_pass\": %.3f, \"tokens_per_s\": %.1f, "
      "\"pass_over_read\": %.3f, \"prefill_tokens_per_s\": %.1f, \"afresh_ms\": %.3f, "
      "\"afresh_over_pass\": %.1f}\n",
      s.mode.c_str(), s.style.c_str(), s.base.c_str(), s.threads, static_cast<long long>(s.batch),
      static_cast<long long>(s.prompt), s.tokens, static_cast<double>(bytes) / 0x1p20,
      static_cast<double>(stats.cache_bytes) / 0x1p20, read, static_cast<double>(bytes) / read * 1e-6, decode,
      static_cast<double>(s.batch) / decode * 1e3, decode / read,
      static_cast<double>(stats.prompt_tokens) / stats.prefill_seconds,
      afresh.empty() ? 0.0 : bench::median(afresh), afresh.empty() ? 0.0 : bench::median(afresh) / decode);
}

}  // namespace

int main(int argc, char** argv) {
  return bench::guarded("bench_generate", [&] { run(parse(argc, argv)); });
}
