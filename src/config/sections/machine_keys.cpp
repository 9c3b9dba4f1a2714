#include <algorithm>
#include <cctype>
#include <cmath>

#include "base/text/excerpt.h"
#include "config/machine.h"
#include "config/rows.h"
#include "config/sections/tables.h"

namespace sherd::config {
namespace {

/// A rate: above 0.
template <class T>
Key<T> rate(std::string_view name, double T::*field, std::string_view example) {
  return real(name, field, example, 0, infinity, true);
}

/// 0 stands for what another key says.
template <class T>
Key<T> rate_or_none(std::string_view name, double T::*field, std::string_view example) {
  return real(name, field, example, 0);
}

std::vector<MeasuredProduct> read_measured(const Value& value) {
  value.expect(Node::Kind::array);
  std::vector<MeasuredProduct> out;
  for (std::size_t i = 0; i < value.node.items.size(); ++i) {
    const Value item = value.item(i);
    const std::vector<double> row = read_numbers(
        item, 4, "four numbers such as [1024, 768, 3072, 1e12]: rows, columns, depth, FLOP/s", 1);
    out.push_back({std::llround(row[0]), std::llround(row[1]), std::llround(row[2]), row[3]});
  }
  return out;
}

Node write_measured(const ProductRates& rates) {
  Node out = list_of(std::vector<bool>());
  for (const MeasuredProduct& p : rates.measured)
    out.items.push_back(list_of(std::vector{static_cast<double>(p.rows), static_cast<double>(p.columns),
                                            static_cast<double>(p.depth), p.flops}));
  return rates.measured.empty() ? Node() : out;
}

Table<AttentionRates> attention_table() {
  using T = AttentionRates;
  return {
      Auto::is_a_value,
      {real("forward", &T::forward, "0.6", 0, 1, true)
           .means("share of the products' peak that long sequences reach"),
       real("backward", &T::backward, "0.5", 0, 1, true).means("likewise, in backward"),
       rate_or_none("half_keys", &T::half_keys, "256").means("keys at which it reaches half of that"),
       rate_or_none("half_width", &T::half_width, "32").means("a head's width likewise"),
       rate_or_none("forward_score_bytes", &T::forward_score_bytes, "11")
           .means("bytes that a score moves through memory, where scores are stored; 0: they are not"),
       rate_or_none("backward_score_bytes", &T::backward_score_bytes, "11").means("likewise, in backward")}};
}

/// Types that products compute on.
const std::vector<std::string> dtypes = {"fp32", "bf16", "fp16", "fp64"};

Table<ProductRates> product_table() {
  using T = ProductRates;
  return {Auto::is_a_value,
          {word<T>(
               "dtype", dtypes, "\"bf16\"", [](const T& rates) { return static_cast<int>(rates.dtype); },
               [](T& rates, int index) { rates.dtype = static_cast<DType>(index); })
               .means("of the operands", required),
           rate("peak", &T::peak, "312e12").means("FLOP/s of the data sheet, without sparsity", required),
           real("efficiency", &T::efficiency, "0.8", 0, 1, true)
               .means("share of the peak that large products reach"),
           rate_or_none("half_depth", &T::half_depth, "128")
               .means("depth at which a product reaches half of that"),
           real("fp8", &T::fp8, "2", 0, infinity, true)
               .means("rate of products in FP8 over this type's, by the data sheet"),
           custom<T>(
               "measured", "[[1024, 768, 3072, 1e12]]",
               [](T& rates, const Value& value) { rates.measured = read_measured(value); }, write_measured)
               .takes({"list of [rows, columns, depth, FLOP/s]", R"({"type": "array"})"})
               .means("products that were measured, which decide instead"),
           section("attention", &T::attention, attention_table()).means("in this type")}};
}

Table<FamilyRate> family_table() {
  using T = FamilyRate;
  return {Auto::is_a_value,
          {text("family", &T::family, "\"norm\"").means("of kernels", required),
           choice("dtype", &T::dtype, dtypes, "\"bf16\"").means("of their elements; none: any"),
           rate("bandwidth", &T::bandwidth, "1e10").means("bytes per second", required)}};
}

Table<DeviceRates> rates_table() {
  using T = DeviceRates;
  return {Auto::is_a_value,
          {integer("ranks", &T::ranks, "2", 0)
               .means("that compute on the machine while it has these rates; 0: any number"),
           list("products", &T::products, R"([{"dtype": "bf16", "peak": 312e12}])", product_table())
               .means("of matrices, by type", required),
           rate("bandwidth", &T::bandwidth, "1.6e12")
               .means("bytes per second, read and written, of kernels that pass over memory", required),
           rate_or_none("latency", &T::latency, "4e-6").means("seconds that the smallest kernel takes"),
           rate_or_none("launch", &T::launch, "5e-6")
               .means("seconds in which a thread queues a kernel: a pass takes no less than that for each"),
           real("overlap", &T::overlap, "0.8", 0, 1)
               .means("share of a call that hides behind kernels which run beside it"),
           list("families", &T::families, R"([{"family": "norm", "bandwidth": 1e10}])", family_table())
               .means("of kernels that have a bandwidth of their own"),
           rate_or_none("update", &T::update, "1.4e12")
               .means("bytes of states per second that the optimizer's step passes over; 0: bandwidth"),
           integer("units", &T::units, "108", 0)
               .means("that share the tiles of a product; 0: its size does not matter"),
           integer("tile_rows", &T::tile_rows, "256", 1).means("of a product's tile"),
           integer("tile_columns", &T::tile_columns, "256", 1).means("likewise")}};
}

Table<Link> link_table() {
  using T = Link;
  return {Auto::is_a_value,
          {text("name", &T::name, "\"NVLink\"").means("as reports call it", required),
           integer("ranks", &T::ranks, "8", 0)
               .means("that follow each other, which it joins; 0: all that there are"),
           rate("bandwidth", &T::bandwidth, "230e9")
               .means("bytes per second that each rank sends while all do", required),
           rate_or_none("latency", &T::latency, "5e-6").means("seconds that a message takes"),
           rate_or_none("sum_bandwidth", &T::sum_bandwidth, "200e9")
               .means("of collectives that sum; 0: the same")}};
}

Table<Host> host_table() {
  using T = Host;
  return {Auto::is_a_value,
          {bytes("memory", &T::memory, "\"1TB\"").means("of a machine"),
           rate_or_none("update", &T::update, "100e9")
               .means("bytes of states per second that optimizers on the processor pass over, all ranks' "
                      "together"),
           rate_or_none("to_device", &T::to_device, "24e9")
               .means("bytes per second to each device; 0: no way between them"),
           rate_or_none("from_device", &T::from_device, "24e9").means("likewise, from it")}};
}

Table<Drive> drive_table() {
  using T = Drive;
  return {Auto::is_a_value,
          {bytes("size", &T::size, "\"15TB\"").means("of a machine's NVMe drives together"),
           rate_or_none("read", &T::read, "20e9").means("bytes per second of all"),
           rate_or_none("write", &T::write, "10e9").means("likewise")}};
}

void check_machine(Machine& machine, const Given&, const Value& file) {
  if (machine.rates.empty()) file.at("rates").error("must have at least one entry");
  for (const DeviceRates& rates : machine.rates)
    if (rates.products.empty())
      file.at("rates").error("an entry has no products: say at least bf16's or fp32's");
  for (std::size_t i = 1; i < machine.links.size(); ++i)
    if (machine.links[i - 1].ranks == 0 ||
        (machine.links[i].ranks > 0 && machine.links[i].ranks <= machine.links[i - 1].ranks))
      file.at("links").error("must go from the link of the nearest ranks to that of all: '",
                             machine.links[i].name, "' joins no more ranks than '", machine.links[i - 1].name,
                             "' before it");
}

const Table<Machine>& machine_table() {
  using T = Machine;
  static const Table<T> table{
      Auto::is_a_value,
      {text("name", &T::name, "\"DGX A100 80GB\"").means("as reports call it", required),
       text("source", &T::source, "\"data sheet, June 2021\"").means("where the rates come from"),
       integer("devices", &T::devices, "8", 1, 1024).means("ranks that a machine has place for"),
       bytes("memory", &T::memory, "\"80GB\"").means("of each device; 0: devices are the host's cores"),
       list("rates", &T::rates, R"([{"products": [{"dtype": "bf16", "peak": 312e12}], "bandwidth": 1.6e12}])",
            rates_table())
           .means("of a rank's device", required),
       list("links", &T::links, R"([{"name": "NVLink", "ranks": 8, "bandwidth": 230e9}])", link_table())
           .means("between ranks, from the nearest to all"),
       section("host", &T::host, host_table()).means("the processor, and its memory"),
       section("drive", &T::drive, drive_table()).means("NVMe")},
      check_machine};
  return table;
}

Machine read(const Node& tree) {
  Context context;
  Machine machine;
  context.attempt([&] { read_section(machine_table(), machine, Value{tree, "", context}); });
  context.raise();
  return machine;
}

}  // namespace

const DeviceRates& Machine::rates_of(std::int64_t ranks) const {
  return *std::min_element(rates.begin(), rates.end(), [&](const DeviceRates& a, const DeviceRates& b) {
    return std::abs(a.ranks - ranks) < std::abs(b.ranks - ranks);
  });
}

Machine Machine::with_devices(std::int64_t ranks) const {
  Machine out = *this;
  for (Link& link : out.links)
    if (link.ranks > 0 && link.ranks <= devices) link.ranks = std::min(link.ranks, ranks);
  out.devices = ranks;
  return out;
}

Machine read_machine(const std::string& path) {
  const Node tree = read_tree(path, "machine");
  if (tree.is(Node::Kind::object) && !tree.find("rates"))
    fail(ErrorKind::config, "'", excerpt(path, 300),
         "' is no machine's file, as it has no `rates`: configs/machines has some, and 'sherd bench machine' "
         "measures one");
  return read(tree);
}

Machine parse_machine(std::string_view text, const std::string& name) {
  return read(parse_tree(text, name));
}

std::string dump(const Machine& machine) {
  const std::string text = written(machine_table(), machine).json(2) + "\n";
  std::string out;
  std::size_t numbers_end = 0;  // of a list of numbers: it goes in one line
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '[')
      if (const std::size_t next = text.find_first_of("[]{}\"", i + 1); text[next] == ']') numbers_end = next;
    if (i >= numbers_end || !std::isspace(static_cast<unsigned char>(text[i]))) out += text[i];
  }
  return out;
}

}  // namespace sherd::config
