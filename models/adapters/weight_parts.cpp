#include "models/adapters/weight_parts.h"

#include <Eigen/Eigenvalues>
#include <Eigen/QR>
#include <cmath>
#include <random>

#include "base/error.h"
#include "tensor/kernels.h"

namespace sherd::models {
namespace {

using Eigen::MatrixXd;
using tensor::Tensor;
using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// Products with a large matrix in fp32, by the kernels that training has; all else is small, and in fp64.
class Products {
 public:
  Products(std::span<const float> weight, std::int64_t rows, std::int64_t columns, device::Device& device)
      : device_(device), kernels_(tensor::make_kernels(device)), weight_(make({rows, columns})) {
    std::copy(weight.begin(), weight.end(), weight_.data<float>());
  }
  std::int64_t rows() const { return weight_.shape()[0]; }
  std::int64_t columns() const { return weight_.shape()[1]; }
  /// W·x
  MatrixXd apply(const MatrixXd& x) { return product(x, false); }
  /// Wᵀ·x
  MatrixXd apply_transposed(const MatrixXd& x) { return product(x, true); }

 private:
  Tensor make(const tensor::Shape& shape) { return Tensor::on_host(device_, shape, DType::f32); }
  MatrixXd product(const MatrixXd& x, bool transposed) {
    const Tensor in = make({x.rows(), x.cols()}), out = make({transposed ? columns() : rows(), x.cols()});
    Eigen::Map<RowMajor>(in.data<float>(), x.rows(), x.cols()) = x.cast<float>();
    kernels_->matmul({.a = weight_, .b = in, .c = out, .trans_a = transposed});
    return Eigen::Map<const RowMajor>(out.data<float>(), out.shape()[0], x.cols()).cast<double>();
  }

  device::Device& device_;
  std::unique_ptr<tensor::Kernels> kernels_;
  Tensor weight_;
};

/// An orthonormal basis of x's columns, orthogonal to those of `others`.
MatrixXd orthonormal(MatrixXd x, const MatrixXd& others) {
  for (int round = 0; round < 2 && others.cols() > 0; ++round) x -= others * (others.transpose() * x);
  const Eigen::HouseholderQR<MatrixXd> qr(x);
  MatrixXd out = qr.householderQ() * MatrixXd::Identity(x.rows(), x.cols());
  if (others.cols() > 0) {  // what had nothing new is anything
    out -= others * (others.transpose() * out);
    out = Eigen::HouseholderQR<MatrixXd>(out).householderQ() * MatrixXd::Identity(x.rows(), x.cols());
  }
  return out;
}

MatrixXd beside(const MatrixXd& a, const MatrixXd& b) {
  MatrixXd out(b.rows(), a.cols() + b.cols());
  if (a.cols() > 0) out.leftCols(a.cols()) = a;
  out.rightCols(b.cols()) = b;
  return out;
}

MatrixXd start(std::int64_t rows, std::int64_t columns) {
  std::mt19937 random(1);  // the same on every rank, and in every run
  return MatrixXd::NullaryExpr(rows, columns, [&] { return random() / 4294967296.0 - 0.5; });
}

struct Triplets {
  MatrixXd left, right;  ///< orthonormal columns
  Eigen::VectorXd values;
};

/// The `rank` largest singular triplets. `wide`: the matrix has no more rows than columns.
Triplets largest_triplets(Products& of, std::int64_t rank) {
  const bool wide = of.rows() <= of.columns();
  const std::int64_t smaller = std::min(of.rows(), of.columns());
  constexpr std::int64_t spare = 8;
  const std::int64_t most = smaller;
  const auto forth = [&](const MatrixXd& x) { return wide ? of.apply_transposed(x) : of.apply(x); };
  const auto back = [&](const MatrixXd& x) { return wide ? of.apply(x) : of.apply_transposed(x); };
  // Q's columns are a basis of the smaller side; T = forth(Q), N = back(T), and the Gram matrix is TᵀT.
  MatrixXd q, t, n, gram;
  MatrixXd block = start(smaller, std::min(rank + spare, most));
  std::int64_t looked_at = 0;  // columns when triplets were last taken of them, which costs their cube
  for (;;) {
    const MatrixXd fresh = orthonormal(block, q);
    const MatrixXd image = forth(fresh);
    q = beside(q, fresh), t = beside(t, image);
    const MatrixXd returned = back(image);
    n = beside(n, returned);
    const MatrixXd products = t.transpose() * image;
    const std::int64_t before = gram.cols();
    MatrixXd grown(t.cols(), t.cols());
    if (before > 0) grown.topLeftCorner(before, before) = gram;
    grown.rightCols(image.cols()) = products;
    grown.bottomRows(image.cols()) = products.transpose();
    gram = std::move(grown);
    block = returned.leftCols(std::min<std::int64_t>(returned.cols(), most - q.cols()));
    if (block.cols() > 0 && q.cols() < looked_at * 5 / 4) continue;
    looked_at = q.cols();
    const Eigen::SelfAdjointEigenSolver<MatrixXd> solved(gram);
    const MatrixXd vectors = solved.eigenvectors().rightCols(rank).rowwise().reverse();
    const Eigen::VectorXd values = solved.eigenvalues().tail(rank).reverse().cwiseMax(0).cwiseSqrt();
    // N·y/σ = σ·Q·y of a true triplet.
    const Eigen::VectorXd inverse =
        values.unaryExpr([](double value) { return value > 0 ? 1 / value : 0.0; });
    const MatrixXd small = q * vectors;
    const double error =
        ((n * vectors) * inverse.asDiagonal() - small * values.asDiagonal()).colwise().norm().maxCoeff();
    const double exact = 3e-8 * std::sqrt(static_cast<double>(std::max<std::int64_t>(64, smaller)));
    if (error <= exact * values[0] || q.cols() >= most) {
      const MatrixXd other = t * vectors * inverse.asDiagonal();
      return {wide ? small : other, wide ? other : small, values};
    }
  }
}

std::vector<float> row_major(const MatrixXd& x) {
  std::vector<float> out(static_cast<std::size_t>(x.size()));
  Eigen::Map<RowMajor>(out.data(), x.rows(), x.cols()) = x.cast<float>();
  return out;
}

}  // namespace

WeightPart largest_part(std::span<const float> weight, std::int64_t out, std::int64_t in, std::int64_t rank,
                        device::Device& processor) {
  require(0 < rank && rank <= std::min(out, in), "a part of rank ", rank, " of [", out, ", ", in, "]");
  Products products(weight, out, in, processor);
  const Triplets found = largest_triplets(products, rank);
  const Eigen::VectorXd roots = found.values.cwiseSqrt();
  return {row_major(roots.asDiagonal() * found.right.transpose()),
          row_major(found.left * roots.asDiagonal())};
}

WeightPart orthogonal_part(std::span<const float> weight, std::int64_t out, std::int64_t in,
                           std::int64_t rank, device::Device& processor) {
  require(0 < rank && rank <= std::min(out, in), "a part of rank ", rank, " of [", out, ", ", in, "]");
  // Q's first columns are those of the matrix of W's first columns.
  const MatrixXd first = Eigen::Map<const RowMajor>(weight.data(), out, in).leftCols(rank).cast<double>();
  const MatrixXd q = Eigen::HouseholderQR<MatrixXd>(first).householderQ() * MatrixXd::Identity(out, rank);
  Products products(weight, out, in, processor);
  return {row_major(products.apply_transposed(q).transpose()), row_major(q)};
}

}  // namespace sherd::models
