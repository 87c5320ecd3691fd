// Arrays whose elements lie more than 2^31 elements apart: offsets are 64-bit everywhere. The
// memory is reserved, not used: only the pages of the rows are touched.
#include <sys/mman.h>

#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/ouzel.h"
#include "tests/random_arrays.h"

namespace ouzel {
namespace {

using Int = std::int64_t;
using Shape = std::array<Int, 4>;

constexpr Int kTokens = 70;

class Reserved {
 public:
  explicit Reserved(Int floats) : bytes_(static_cast<std::size_t>(floats) * sizeof(float)) {
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at != MAP_FAILED) data_ = static_cast<float*>(at);
  }
  ~Reserved() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  Reserved(const Reserved&) = delete;
  float* data() const { return data_; }

 private:
  std::size_t bytes_;
  float* data_ = nullptr;
};

// Far apart: 2^25 elements between tokens (2.3e9 over 70 tokens), or 2^31 + 2^20 between batch
// rows.
struct Spacing {
  Int batch, token;
};
constexpr Spacing kSpacings[] = {{Int{1} << 24, Int{1} << 25},
                                 {(Int{1} << 31) + (Int{1} << 20), 4096}};

// Runs `call` on tensors in dense memory and far apart, with the same inputs; the outputs must
// agree bit for bit. Tensors 0 to inputs - 1 are inputs, the rest outputs.
template <class Call>
void expect_same(const std::vector<Shape>& shapes, std::size_t inputs, const Call& call) {
  for (const Spacing& spacing : kSpacings) {
    Reserved memory(kTokens * spacing.token + 2 * spacing.batch);
    if (memory.data() == nullptr) GTEST_SKIP() << "no address space of this size";
    std::vector<std::vector<float>> dense;
    std::vector<Tensor> dense_tensors, far_tensors;
    test::Random random(3);
    Int begin = 0;
    for (const Shape& shape : shapes) {
      const View<float, 4> far(memory.data() + begin, shape,
                               {spacing.batch, spacing.token, shape[3], 1});
      begin += shape[2] * shape[3];
      dense.emplace_back(static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3]));
      for (std::size_t i = 0; i < dense.back().size() && dense.size() <= inputs; ++i) {
        dense.back()[i] = static_cast<float>(random.uniform(-1, 1));
      }
      const View<float, 4> near(dense.back().data(), shape);
      for (Int b = 0; b < shape[0]; ++b) {
        for (Int t = 0; t < shape[1]; ++t) {
          const auto row = static_cast<std::size_t>(shape[2] * shape[3]) * sizeof(float);
          std::memcpy(far(b, t), near(b, t), row);
        }
      }
      dense_tensors.push_back(near);
      far_tensors.push_back(far);
    }
    Context context;
    call(context, dense_tensors);
    call(context, far_tensors);
    for (std::size_t i = inputs; i < shapes.size(); ++i) {
      const auto far = far_tensors[i].view<float, 4>(), near = dense_tensors[i].view<float, 4>();
      const auto row = static_cast<std::size_t>(shapes[i][2] * shapes[i][3]) * sizeof(float);
      for (Int b = 0; b < shapes[i][0]; ++b) {
        for (Int t = 0; t < shapes[i][1]; ++t) {
          ASSERT_EQ(std::memcmp(far(b, t), near(b, t), row), 0)
              << "tensor " << i << " row " << b << " token " << t << " token stride "
              << spacing.token;
        }
      }
    }
  }
}

TEST(Offsets, LinearAttentionBeyond31Bits) {
  const Shape keys{2, kTokens, 2, 16}, values{2, kTokens, 2, 24};
  // q, k, v, do, then o, dq, dk, dv.
  expect_same({keys, keys, values, values, values, keys, keys, values}, 4,
              [](Context& context, const std::vector<Tensor>& t) {
                LinearAttentionOptions options;
                options.feature_map.kind = FeatureMapKind::kElu1;
                options.normalize = true;
                RecurrenceInputs inputs;
                inputs.q = t[0];
                inputs.k = t[1];
                inputs.v = t[2];
                RecurrenceOutputs outputs;
                outputs.o = t[4];
                linear_attention(context, options, inputs, outputs);
                RecurrenceOutputGrads upstream;
                upstream.o = t[3];
                RecurrenceInputGrads gradients;
                gradients.q = t[5];
                gradients.k = t[6];
                gradients.v = t[7];
                linear_attention_backward(context, options, inputs, nullptr, upstream, gradients,
                                          nullptr);
              });
}

TEST(Offsets, SoftmaxAttentionBeyond31Bits) {
  const Shape keys{2, kTokens, 2, 16}, values{2, kTokens, 2, 24};
  expect_same({keys, keys, values, values, values, keys, keys, values}, 4,
              [](Context& context, const std::vector<Tensor>& t) {
                const SoftmaxAttentionInputs inputs{t[0], t[1], t[2], nullptr, nullptr};
                std::vector<double> memory(2 * kTokens * 2);
                const Tensor lse(memory.data(), std::array{Int{2}, kTokens, Int{2}});
                softmax_attention(context, {}, inputs, {t[4], lse});
                softmax_attention_backward(context, {}, inputs, t[4], lse, t[3], t[5], t[6], t[7]);
              });
}

TEST(Offsets, ShortConvBeyond31Bits) {
  const Shape rows{2, kTokens, 1, 40};
  // x, dy, then y, dx; [B, T, 1, D] is [B, T, D].
  expect_same({rows, rows, rows, rows}, 2, [](Context& context, const std::vector<Tensor>& t) {
    const auto flat = [](const Tensor& x) {
      Tensor y = x;
      y.rank = 3;
      y.extent[2] = x.extent[3];
      y.stride[2] = 1;
      return y;
    };
    const std::vector<float> weights(40 * 4, 0.5f);
    const ConstTensor weight(weights.data(), std::array{Int{40}, Int{4}});
    const ShortConvInputs inputs{flat(t[0]), weight, {}, {}, nullptr};
    short_conv(context, {ConvActivation::kSilu}, inputs, flat(t[2]), {});
    short_conv_backward(context, {ConvActivation::kSilu}, inputs, flat(t[1]), {}, flat(t[3]), {},
                        {}, {});
  });
}

}  // namespace
}  // namespace ouzel
