#include "config/sections/tables.h"

namespace sherd::config {
namespace {

/// The sections as the file has them; Precision has one type to compute in.
struct Fp16Section {
  bool enabled = false;
  LossScaling scaling;
};
struct Bf16Section {
  bool enabled = false;
  bool check_grad_overflow = true;
};

Table<Fp16Section> fp16_table() {
  using S = LossScaling;
  Table<Fp16Section> table{
      Auto::to_default,
      {boolean("enabled", &Fp16Section::enabled)
           .means("compute in fp16, with loss scaling, beside fp32 masters; not together with `bf16`",
                  Auto::needs_caller)}};
  for (const Key<S>& key :
       {real("loss_scale", &S::loss_scale, "128", 0).means("factor of the loss; 0: dynamic"),
        integer("initial_scale_power", &S::initial_scale_power, "8", 0, 100)
            .means("the dynamic scale begins at 2 to the power of this",
                   "0.16 began at 2³² where no key of the scale was given"),
        integer("loss_scale_window", &S::loss_scale_window, "50", 1)
            .means("steps without an overflow before the scale doubles",
                   "in the step in which it doubles, gradients there are divided by the new scale; here by "
                   "that which they were computed with"),
        integer("hysteresis", &S::hysteresis, "3", 1).means("overflows before the scale halves"),
        boolean("consecutive_hysteresis", &S::consecutive_hysteresis)
            .means("each step without an overflow refills the hysteresis"),
        real("min_loss_scale", &S::min_loss_scale, "4", 0, infinity, true)
            .means("least dynamic scale; an overflow there ends the run", "takes whole numbers alone")})
    table.keys.push_back(inside(&Fp16Section::scaling, key));
  append(table.keys, foreign_keys<Fp16Section>("fp16"));
  return table;
}

Table<Bf16Section> bf16_table() {
  using B = Bf16Section;
  Table<B> table{
      Auto::to_default,
      {boolean("enabled", &B::enabled)
           .means("compute in bf16 beside fp32 masters; not together with `fp16`", Auto::needs_caller),
       boolean("check_grad_overflow", &B::check_grad_overflow)
           .means("skip a step whose gradients hold infinities or NaN",
                  "checks at stages 1 and 2 alone; 0.16 never")}};
  append(table.keys, foreign_keys<B>("bf16"));
  return table;
}

/// A section S of DeepSpeed's that becomes fields of the precision.
template <class S>
Key<Config> precision_section(std::string_view name, Table<S> table, S (*get)(const Precision&),
                              void (*put)(Precision&, const S&, const Value&)) {
  const auto shared = std::make_shared<const Table<S>>(std::move(table));
  Key<Config> key = custom<Config>(
      name, "{}",
      [=](Config& config, const Value& section) {
        S read;
        read_section(*shared, read, section);
        put(config.precision, read, section);
      },
      [=](const Config& config) { return written(*shared, get(config.precision)); });
  key.below = infos(*shared);
  return key;
}

/// One precision for the run: enabling both sections is an error at the second.
void set_compute(Precision& precision, bool enabled, DType dtype, const Value& section) {
  if (!enabled) return section.note("not enabled, no effect");
  if (precision.compute != DType::f32) section.error("fp16 and bf16 are both enabled; enable one of them");
  precision.compute = dtype;
}

void put_fp16(Precision& precision, const Fp16Section& fp16, const Value& section) {
  const LossScaling& scaling = fp16.scaling;
  if (fp16.enabled && scaling.dynamic() && scaling.initial_scale() < scaling.min_loss_scale)
    section.error("the initial loss scale 2^", scaling.initial_scale_power, " is below min_loss_scale ",
                  scaling.min_loss_scale);
  precision.fp16 = scaling;
  set_compute(precision, fp16.enabled, DType::f16, section);
}

void put_bf16(Precision& precision, const Bf16Section& bf16, const Value& section) {
  precision.check_grad_overflow = bf16.check_grad_overflow;
  set_compute(precision, bf16.enabled, DType::bf16, section);
}

/// By the names of PyTorch, too.
Key<Precision> dtype_key(const char* name, const char* example, std::optional<DType> Precision::*field) {
  static const std::vector<std::string> names = {"fp32", "fp16", "bf16"};
  return custom<Precision>(
             name, example,
             [field](Precision& precision, const Value& value) {
               constexpr DType in_order[] = {DType::f32, DType::f16, DType::bf16};
               const auto dtype = parse_dtype(value.text());
               const bool good = dtype && size_of(*dtype) <= 4 && is_floating(*dtype);
               precision.*field = good ? *dtype : in_order[value.choice(names)];
             },
             [field](const Precision& precision) {
               return precision.*field ? node_of(std::string(name_of(*(precision.*field)))) : Node();
             })
      .one_of(names)
      .with(by("the model's"));
}

Table<Precision> data_types_table() {
  Table<Precision> table{Auto::is_a_value,
                         {dtype_key("grad_accum_dtype", "\"fp32\"", &Precision::grad_accum_dtype)
                              .means("type in which gradients accumulate: fp32, or the model's own",
                                     "0.16: fp32 for bf16 without ZeRO")}};
  append(table.keys, foreign_keys<Precision>("data_types"));
  return table;
}

Table<Fp8> fp8_table() {
  return {
      Auto::to_default,
      {boolean("enabled", &Fp8::enabled)
           .means("run the products of linear layers and experts in FP8, what is left in bf16; needs `bf16` "
                  "([more](fp8.md))"),
       choice("recipe", &Fp8::recipe, {"current", "blockwise", "rowwise"}, "\"current\"")
           .means(
               "who shares a scale: a tensor, with gradients in E5M2; blocks of 128 numbers, of weights 128 "
               "x 128; or a row"),
       custom<Fp8>(
           "exclude", "[\"blocks.0.*\"]",
           [](Fp8& fp8, const Value& value) { fp8.exclude = read_patterns(value, "\"blocks.0.*\""); },
           [](const Fp8& fp8) { return list_of(fp8.exclude); })
           .takes({"string, or list of strings",
                   R"({"type": ["string", "array"], "items": {"type": "string"}})"})
           .means("patterns of full names of weights whose products stay in bf16 (`*` matches dots too); "
                  "`sherd train --fp8-report` tells which layers lose"),
       boolean("gather", &Fp8::gather)
           .means(
               "at ZeRO stage 3 gather the weights of these products in FP8, in half the bytes and with the "
               "same results",
               Concerns::run, idle([](const Config& config) {
                 return config.fp8.enabled && config.fp8.gather && config.fp8.recipe == Fp8RecipeName::rowwise
                            ? "no effect with the recipe rowwise: a weight and its transpose have other "
                              "numbers"
                            : "";
               }))}};
}

}  // namespace

std::vector<Key<Config>> precision_keys() {
  return {precision_section<Fp16Section>(
              "fp16", fp16_table(),
              [](const Precision& p) {
                return Fp16Section{p.compute == DType::f16, p.fp16};
              },
              put_fp16),
          precision_section<Bf16Section>(
              "bf16", bf16_table(),
              [](const Precision& p) {
                return Bf16Section{p.compute == DType::bf16, p.check_grad_overflow};
              },
              put_bf16)
              .with(also("bfloat16")),
          section("fp8", &Config::fp8, fp8_table()).with(unless_default),
          section("data_types", &Config::precision, data_types_table()),
          inside(&Config::precision,
                 dtype_key("communication_data_type", "\"bf16\"", &Precision::communication_data_type))
              .means("type to which each rank's gradients are rounded before they travel; sums are fp32",
                     "sums are of that type there, in the order of NCCL's algorithm", Auto::to_default)};
}

void check_precision(const Config& config, const Given& given) {
  const Precision& precision = config.precision;
  if (const auto fp8 = given.find("fp8");
      fp8 != given.end() && config.fp8.enabled && precision.compute != DType::bf16)
    fail(ErrorKind::config, fp8->second->place.str(),
         ": fp8.enabled: what is not in FP8 is computed in bf16, and this ", "run computes in ",
         name_of(precision.compute), "; add \"bf16\": {\"enabled\": true}",
         precision.compute == DType::f16 ? " in place of fp16" : "");
  if (!given.contains("data_types")) return;
  const Node& section = *given.at("data_types");
  const DType accumulate = precision.gradient_dtype();
  if (const Node* node = section.find("grad_accum_dtype");
      node && accumulate != DType::f32 && accumulate != precision.compute)
    fail(ErrorKind::config, node->place.str(), ": data_types.grad_accum_dtype: ", node->brief(),
         " does not go with a model in ", name_of(precision.compute), "; use \"fp32\" or \"",
         name_of(precision.compute), "\"");
  if (const Node* node = section.find("param_dtype"); node && node->is(Node::Kind::string))
    if (parse_dtype(node->text) != precision.compute)
      fail(ErrorKind::config, node->place.str(), ": data_types.param_dtype: ", node->brief(),
           " contradicts the model's ", name_of(precision.compute),
           "; choose the precision with the sections fp16 and bf16");
}

}  // namespace sherd::config
