// Products in FP8 beside those in bf16, and what quantising costs: each recipe's forward product, gradient of
// inputs and gradient of weights of a square linear layer, all taking turns in one run, as ratios of medians.
// Prints lines "name: figures". On the processor it only shows that it runs: FP8 is computed in bf16 there.
#include <cstdio>

#include "base/cpu_isa.h"
#include "bench/programs/options.h"
#include "bench/suite/rounds.h"
#include "device/cuda.h"
#include "tensor/kernels.h"

namespace {

using namespace sherd;
using namespace sherd::tensor;

struct Fp8BenchOptions {
  bool cuda = false;
  int rounds = 9, calls = 10;  ///< calls: of a contender's turn
  std::int64_t size = 4096;    ///< tokens, inputs and outputs
};

class Fp8Bench {
 public:
  explicit Fp8Bench(const Fp8BenchOptions& options)
      : options_(options),
        device_(options.cuda ? device::make_cuda_device({.threads = 1})
                             : device::make_cpu_device(available_cores())),
        kernels_(make_kernels(*device_)),
        x_(matrix(1)),
        weight_(matrix(2)),
        dy_(matrix(3)),
        out_(Tensor::empty(*device_, x_.shape(), DType::bf16)),
        bytes_(Tensor::empty(*device_, {x_.numel() * 3 / 2}, DType::u8)),
        copied_(Tensor::empty(*device_, bytes_.shape(), DType::u8)) {}

  void run() {
    add("bf16 forward", {.a = x_, .b = weight_, .c = out_, .trans_b = true});
    add("bf16 dx", {.a = dy_, .b = weight_, .c = out_});
    add("bf16 dw", {.a = dy_, .b = x_, .c = out_, .trans_a = true});
    // Reads and writes as many bytes together as quantising does, which reads two for each that it writes.
    add("copy", [this] { kernels_->copy(bytes_, copied_); });
    std::vector<Fp8Recipe> recipes;
    for (const Fp8Recipe& recipe : fp8_recipes()) {
      try {
        kernels_->require_fp8(recipe);
      } catch (const Error& error) {
        std::printf("fp8 %s: unavailable: %s\n", std::string(recipe.name).c_str(), error.what());
        continue;
      }
      recipes.push_back(recipe);
      add_recipe(recipe);
    }
    bench::Rounds rounds(options_.rounds);
    rounds.run(contenders_, 2);
    report(rounds, "bf16", "bf16");
    for (const Fp8Recipe& recipe : recipes) report_recipe(rounds, recipe);
  }

 private:
  Tensor matrix(std::uint64_t stream) {
    Tensor out = Tensor::empty(*device_, {options_.size, options_.size}, DType::bf16);
    kernels_->fill_normal(out, {1, stream}, 0, 0, 1);
    return out;
  }
  void add(const std::string& name, std::function<void()> call) {
    contenders_.push_back({name,
                           [this, call = std::move(call)] {
                             for (int i = 0; i < options_.calls; ++i) call();
                           },
                           [this] { device_->synchronize(); }});
  }
  void add(const std::string& name, const Matmul& product) {
    add(name, [this, product] { kernels_->matmul(product); });
  }
  /// x, or its transpose, in FP8; and a contender that makes it again.
  Fp8Matrix quantised(const std::string& name, const Tensor& x, bool transposed, Fp8Rule rule) {
    Fp8Matrix out = empty_fp8(*device_, rule, options_.size, options_.size);
    const auto make = [this, x, transposed, out] { kernels_->to_fp8(x, transposed, out, {}); };
    make();
    add(name, make);
    return out;
  }
  void add_recipe(const Fp8Recipe& recipe) {
    const std::string name = cat("fp8 ", recipe.name);
    const auto made = [&](const char* what, const Tensor& x, bool transposed, Fp8Rule rule) {
      return quantised(cat(name, " quantise ", what), x, transposed, rule);
    };
    const Fp8Matrix x = made("x", x_, false, recipe.input), xt = made("xT", x_, true, recipe.input),
                    w = made("w", weight_, false, recipe.weight),
                    wt = made("wT", weight_, true, recipe.weight),
                    dy = made("dy", dy_, false, recipe.gradient),
                    dyt = made("dyT", dy_, true, recipe.gradient);
    add(cat(name, " forward"), {.c = out_, .fp8_a = x, .fp8_b = w});
    add(cat(name, " dx"), {.c = out_, .fp8_a = dy, .fp8_b = wt});
    add(cat(name, " dw"), {.c = out_, .fp8_a = dyt, .fp8_b = xt});
  }

  double seconds(const bench::Rounds& rounds, const std::string& name) const {
    return rounds.median_seconds(name) / options_.calls;
  }
  void report(const bench::Rounds& rounds, const std::string& name, const std::string& beside) const {
    const auto n = static_cast<double>(options_.size);
    for (const char* product : {" forward", " dx", " dw"}) {
      const double took = seconds(rounds, name + product);
      std::printf("%s%s: %.4g TFLOP/s", name.c_str(), product, 2 * n * n * n / took / 1e12);
      if (name != beside) std::printf(", %.2f x bf16", rounds.ratio(beside + product, name + product));
      std::printf("\n");
    }
  }
  void report_recipe(const bench::Rounds& rounds, const Fp8Recipe& recipe) const {
    const std::string name = cat("fp8 ", recipe.name);
    report(rounds, name, "bf16");
    double all = 0, plain = 0;
    const auto moved = 2 * static_cast<double>(bytes_.bytes());
    for (const char* what :
         {" quantise x", " quantise xT", " quantise w", " quantise wT", " quantise dy", " quantise dyT"}) {
      const double took = seconds(rounds, name + what);
      all += took;
      std::printf("%s%s: %.0f GB/s, %.0f %% of a copy\n", name.c_str(), what, moved / took / 1e9,
                  100 * rounds.ratio("copy", name + what));
    }
    for (const char* product : {" forward", " dx", " dw"})
      all += seconds(rounds, name + product), plain += seconds(rounds, std::string("bf16") + product);
    std::printf("%s layer: %.2f x bf16, quantising included\n", name.c_str(), plain / all);
  }

  Fp8BenchOptions options_;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<Kernels> kernels_;
  Tensor x_, weight_, dy_, out_, bytes_, copied_;
  std::vector<bench::Contender> contenders_;
};

}  // namespace

int main(int argc, char** argv) {
  return bench::guarded("bench_fp8", [&] {
    Fp8BenchOptions options;
    bench::Options("bench_fp8", "[--device cpu|cuda] [--size 4096] [--rounds 9] [--calls 10]")
        .value("device",
               [&](const std::string& text) {
                 require(text == "cpu" || text == "cuda", "--device takes cpu or cuda, not '", text, "'");
                 options.cuda = text == "cuda";
               })
        .value("size", options.size)
        .value("rounds", options.rounds)
        .value("calls", options.calls)
        .parse(argc, argv);
    require(options.size > 0 && options.size % fp8_alignment == 0, "--size takes a multiple of 16");
    Fp8Bench(options).run();
  });
}
