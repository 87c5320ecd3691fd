// DLPack and NumPy at the border.
#include "python/src/arrays.h"

#include <nanobind/stl/string.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "ouzel/error.h"
#include "python/src/arguments.h"

namespace ouzel::python {
namespace {

[[noreturn]] void refuse(const std::string& sentence) {
  throw Error(ErrorKind::kInvalidArgument, sentence);
}

// Whether numbers of it are hidden by a mask, which DLPack would lose.
bool is_masked(nb::handle object) {
  return std::string_view(Py_TYPE(object.ptr())->tp_name) != "numpy.ndarray" &&
         nb::hasattr(object, "mask") && nb::hasattr(object, "filled");
}

// NumPy knows bfloat16 by an extension type only, which it exports to nobody.
bool is_numpy_bfloat16(nb::handle object) {
  if (!nb::hasattr(object, "dtype") || !nb::hasattr(object, "view")) return false;
  const nb::object dtype = object.attr("dtype");
  return nb::cast<std::string>(nb::str(dtype)) == "bfloat16";
}

std::optional<DType> dtype_of(const nb::dlpack::dtype& dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto is = [&](Code code, int bits) {
    return dtype.code == static_cast<std::uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
  };
  if (is(Code::Float, 32)) return DType::kF32;
  if (is(Code::Float, 64)) return DType::kF64;
  if (is(Code::Float, 16)) return DType::kF16;
  if (is(Code::Bfloat, 16)) return DType::kBF16;
  if (is(Code::Int, 64)) return DType::kI64;
  if (is(Code::Int, 32)) return DType::kI32;
  if (is(Code::UInt, 8)) return DType::kU8;
  return std::nullopt;
}

nb::dlpack::dtype dlpack_of(DType dtype) {
  using Code = nb::dlpack::dtype_code;
  const Code code = dtype == DType::kBF16 ? Code::Bfloat : Code::Float;
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * size_of(dtype)), 1};
}

enum class Framework { kNumpy, kTorch, kJax, kCapsule, kOther };

// The module that a type says to be of, "" where it says nothing that is a text.
std::string_view module_of(nb::handle type) {
  const nb::object name = nb::getattr(type, "__module__", nb::none());
  const char* text = PyUnicode_Check(name.ptr()) ? PyUnicode_AsUTF8(name.ptr()) : nullptr;
  if (text == nullptr) PyErr_Clear();
  return text == nullptr ? "" : text;  // the type keeps it
}

bool is_of(std::string_view module, std::string_view package) {
  return module.starts_with(package) &&
         (module.size() == package.size() || module[package.size()] == '.');
}

// Of the type, or of that which it inherits its __dlpack__ from.
Framework framework_of(nb::handle like) {
  if (PyCapsule_CheckExact(like.ptr())) return Framework::kCapsule;
  const PyTypeObject* type = Py_TYPE(like.ptr());
  if (std::string_view(type->tp_name) == "numpy.ndarray") return Framework::kNumpy;
  for (const nb::handle base : nb::borrow<nb::tuple>(type->tp_mro)) {
    if (!nb::cast<bool>(base.attr("__dict__").attr("__contains__")("__dlpack__"))) continue;
    const std::string_view module = module_of(base);
    if (is_of(module, "torch")) return Framework::kTorch;
    if (is_of(module, "jax") || is_of(module, "jaxlib")) return Framework::kJax;
    if (is_of(module, "numpy")) return Framework::kNumpy;
    break;
  }
  return Framework::kOther;
}

// Whether it still owns an array; whoever takes that renames the capsule.
bool is_fresh(nb::handle capsule) {
  return PyCapsule_IsValid(capsule.ptr(), "dltensor") == 1 ||
         PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") == 1;
}

[[noreturn]] void refuse_type(nb::handle object, const std::string& what) {
  throw nb::type_error((what + " is of type " + type_of(object) +
                        "; a NumPy array or one with __dlpack__ was expected")
                           .c_str());
}

// What nanobind is to take for an array: itself, or the capsule of an exporter that we do not know.
// Nanobind marks as taken what it is given, not what it asks for: an exporter that hands out one
// capsule twice would have its memory freed twice. Of other buffers it takes a view, which has the
// strides that it reads: ctypes' arrays leave them out.
nb::object source_of(nb::handle object, const std::string& what) {
  const Framework framework = framework_of(object);
  nb::object capsule = nb::borrow(object);
  if (framework == Framework::kOther && nb::hasattr(object, "__dlpack__")) {
    try {
      // Says of a read-only array that it is; older exporters do not know the keyword.
      using nb::literals::operator""_a;
      capsule = object.attr("__dlpack__")("max_version"_a = nb::make_tuple(1, 0));
    } catch (const nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      capsule = object.attr("__dlpack__")();
    }
    if (!PyCapsule_CheckExact(capsule.ptr())) {
      throw nb::type_error((what + ": its __dlpack__ returned a value of type " + type_of(capsule) +
                            ", not a capsule")
                               .c_str());
    }
  } else if (framework == Framework::kOther && PyObject_CheckBuffer(object.ptr()) != 0) {
    const nb::object view = nb::steal(PyMemoryView_FromObject(object.ptr()));
    if (view.is_valid()) return view;
    PyErr_Clear();
    refuse_type(object, what);
  } else if (framework != Framework::kCapsule) {
    return capsule;
  }
  if (!is_fresh(capsule)) {
    refuse(what + " is a capsule that is not DLPack's or was taken before: each serves once");
  }
  return capsule;
}

}  // namespace

GivenArray::GivenArray(nb::handle object, std::string_view call, std::string_view name) {
  const auto what = [&] { return std::string(call) + ": " + std::string(name); };
  if (framework_of(object) == Framework::kTorch &&
      nb::cast<bool>(nb::getattr(object, "requires_grad", nb::bool_(false)))) {
    refuse(what() + " requires a gradient, which this function would lose: call the one of " +
           "ouzel.torch, or pass the tensor's detach()");
  }
  if (framework_of(object) == Framework::kTorch && nb::hasattr(object, "is_neg") &&
      nb::cast<bool>(object.attr("is_neg")())) {
    refuse(what() + " is a view whose sign PyTorch has yet to turn (as of conj().imag): pass its " +
           "resolve_neg()");
  }
  if (is_masked(object)) {
    refuse(what() + " is a masked array, and its mask would be lost: pass its filled(...), or of " +
           "sequences that are shorter than others cu_seqlens");
  }
  nb::object source = source_of(object, what());
  if (!nb::try_cast(source, array_)) {
    const bool bfloat16 = is_numpy_bfloat16(source);
    if (bfloat16) source = source.attr("view")("uint16");
    if (!bfloat16 || !nb::try_cast(source, array_)) {
      // What the array itself says is wrong (a tensor that requires gradients, ...).
      if (nb::hasattr(object, "__dlpack__")) object.attr("__dlpack__")();
      refuse_type(object, what());
    }
    tensor_.dtype = DType::kBF16;
  } else {
    const std::optional<DType> dtype = dtype_of(array_.dtype());
    if (!dtype) {
      refuse(what() + " has a type of " + std::to_string(array_.dtype().bits) +
             " bits that is none of ours; float32, bfloat16 or float16 was expected");
    }
    tensor_.dtype = *dtype;
  }
  const int device = array_.device_type();
  if (device != nb::device::cpu::value && device != nb::device::cuda_host::value) {
    refuse(what() + " lives on a device (DLPack type " + std::to_string(device) +
           "); move it to the CPU first");
  }
  if (array_.ndim() > static_cast<std::size_t>(kMaxRank)) {
    refuse(what() + " has " + std::to_string(array_.ndim()) +
           " axes; no tensor of an operator has "
           "more than " +
           std::to_string(kMaxRank));
  }
  tensor_.data = array_.data();
  tensor_.rank = static_cast<int>(array_.ndim());
  if (tensor_.rank != 0 && array_.shape_ptr() == nullptr)
    refuse(what() + " has axes, but no shape");
  for (std::size_t i = 0; i < array_.ndim(); ++i) {
    tensor_.extent[i] = static_cast<std::int64_t>(array_.shape(i));
    if (tensor_.extent[i] < 0) refuse(what() + " has an axis of a length below 0");
    tensor_.stride[i] = array_.stride(i);
  }
  // PyTorch's tensors of zeros without storage, for one.
  if (tensor_.data == nullptr && array_.size() != 0) {
    refuse(what() + " has a shape, but no memory that holds its numbers; pass a copy of it");
  }
}

void GivenArray::check_writable(nb::handle object, std::string_view call, std::string_view name) {
  // A capsule says nothing, and is taken once.
  if (PyCapsule_CheckExact(object.ptr())) return;
  if (framework_of(object) == Framework::kJax) {
    refuse(std::string(call) + ": " + std::string(name) +
           " is an array of JAX, which never changes; pass it as the initial state of a call with "
           "output_final_state=True");
  }
  const std::string what = std::string(call) + ": " + std::string(name);
  nb::ndarray<> array;
  if (nb::try_cast(source_of(object, what), array)) return;
  refuse(what + " is read-only; a state that is updated must be writable");
}

ResultArray::ResultArray(const std::vector<std::int64_t>& shape, DType dtype) {
  std::int64_t bytes = size_of(dtype);
  for (const std::int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) {
      throw Error(ErrorKind::kOutOfMemory, "a result is larger than memory can be");
    }
  }
  memory_ = Buffer(static_cast<std::size_t>(bytes));
  tensor_.data = memory_.data();
  tensor_.dtype = dtype;
  tensor_.rank = static_cast<int>(shape.size());
  std::int64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    tensor_.extent[i] = shape[i];
    tensor_.stride[i] = step;
    step *= shape[i];
  }
}

nb::object ResultArray::release(nb::handle like) {
  const Framework framework = framework_of(like);
  const bool numpy = framework == Framework::kNumpy || framework == Framework::kOther;
  const bool numpy_bfloat16 = numpy && tensor_.dtype == DType::kBF16;
  std::array<std::size_t, kMaxRank> shape{};
  for (std::size_t i = 0; i < shape.size(); ++i)
    shape[i] = static_cast<std::size_t>(tensor_.extent[i]);
  auto* const memory = new Buffer(std::move(memory_));
  const nb::capsule owner(memory, [](void* p) noexcept { delete static_cast<Buffer*>(p); });
  const auto dtype = numpy_bfloat16 ? nb::dtype<std::uint16_t>() : dlpack_of(tensor_.dtype);
  const auto make = [&]<class Kind>(Kind) {
    return nb::ndarray<Kind>(tensor_.data, static_cast<std::size_t>(tensor_.rank), shape.data(),
                             owner, nullptr, dtype)
        .cast(nb::rv_policy::reference);
  };
  if (framework == Framework::kTorch) return make(nb::pytorch());
  if (framework == Framework::kJax) return make(nb::jax());
  if (framework == Framework::kCapsule) return make(nb::no_framework());
  nb::object array = make(nb::numpy());
  if (!numpy_bfloat16) return array;
  // NumPy's own bfloat16 is that of ml_dtypes; `like` may be of another type.
  return array.attr("view")(nb::module_::import_("ml_dtypes").attr("bfloat16"));
}

}  // namespace ouzel::python
