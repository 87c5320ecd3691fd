// Files: hostile safetensors and JSON are refused with a sentence that says why, harmless
// differences are read, and nothing is ever half-written.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "src/base/half.h"
#include "src/formats/files.h"
#include "src/formats/json.h"
#include "src/formats/safetensors.h"
#include "tests/errors.h"
#include "tests/temp_folder.h"

namespace ouzel {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

// A folder of its own for each test.
class Formats : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_ / name; }

  std::string put(const std::string& content, const std::string& name = "f.safetensors") const {
    std::ofstream(path(name), std::ios::binary) << content;
    return path(name);
  }

  // A file of this header and so many bytes of data.
  std::string put_header(const std::string& header, std::size_t data_bytes) const {
    std::string content;
    for (int i = 0; i < 8; ++i) {
      content += static_cast<char>(static_cast<std::uint64_t>(header.size()) >> 8 * i & 0xff);
    }
    return put(content + header + std::string(data_bytes, '\x01'));
  }

  std::vector<std::string> names() const {
    std::vector<std::string> list;
    for (const auto& entry : fs::directory_iterator(folder_.path())) {
      list.push_back(entry.path().filename().string());
    }
    return list;
  }

  test::TempFolder folder_;
};

void expect_bad(const std::string& path, const std::string& part) {
  expect_error(ErrorKind::kBadFile, part, [&] { SafetensorsReader reader(path); });
  expect_error(ErrorKind::kBadFile, path, [&] { SafetensorsReader reader(path); });
}

TEST_F(Formats, RoundTripKeepsNamesTypesShapesBytesAndMetadata) {
  const std::vector<float> f32 = {1.5f, -2, 3, 4, 5, 6};
  const std::vector<double> f64 = {0.1, 1e300};
  const std::vector<std::uint8_t> u8 = {1, 2, 3};
  const std::vector<std::int64_t> i64 = {-1};
  write_safetensors(path("a"),
                    {{"bytes", ConstTensor(u8.data(), DType::kU8, {3})},
                     {"matrix", ConstTensor(f32.data(), DType::kF32, {2, 3})},
                     {"empty", ConstTensor(f32.data(), DType::kF32, {0, 3})},
                     {"scalar", ConstTensor(i64.data(), DType::kI64, {})},
                     {"doubles", ConstTensor(f64.data(), DType::kF64, {2})}},
                    {{"op", "gla"}, {"unicode", "é\"\n"}});
  const SafetensorsReader reader(path("a"));
  EXPECT_EQ(reader.metadata().size(), 2u);
  EXPECT_EQ(reader.metadata().at("unicode"), "é\"\n");
  ASSERT_EQ(reader.tensors().size(), 5u);
  EXPECT_EQ(reader.find("no such"), nullptr);
  const NamedTensor* matrix = reader.find("matrix");
  ASSERT_NE(matrix, nullptr);
  EXPECT_EQ(matrix->dtype, DType::kF32);
  EXPECT_EQ(matrix->shape, (std::vector<std::int64_t>{2, 3}));
  std::vector<float> back(6);
  reader.read(*matrix, back.data());
  EXPECT_EQ(back, f32);
  EXPECT_EQ(reader.find("scalar")->size(), 1);
  EXPECT_TRUE(reader.find("scalar")->shape.empty());
  EXPECT_EQ(reader.find("empty")->size(), 0);
  std::vector<double> doubles(2);
  reader.read_f64(*reader.find("doubles"), doubles.data());
  EXPECT_EQ(doubles, f64);
  for (const NamedTensor& tensor : reader.tensors()) {
    EXPECT_EQ(tensor.offset % static_cast<std::uint64_t>(size_of(*tensor.dtype)), 0u)
        << tensor.name;
  }
}

TEST_F(Formats, ConvertsEveryFloatTypeAndMoreThanABlock) {
  const std::int64_t n = 20001;
  std::vector<double> f64;
  std::vector<float> f32;
  std::vector<Float16> f16;
  std::vector<BFloat16> bf16;
  for (std::int64_t i = 0; i < n; ++i) {
    f64.push_back(static_cast<double>(i) / 7 - 1000);
    f32.push_back(static_cast<float>(f64.back()));
    f16.push_back(to_f16(f32.back()));
    bf16.push_back(to_bf16(f32.back()));
  }
  write_safetensors(path("a"),
                    {{"f64", ConstTensor(f64.data(), DType::kF64, {n})},
                     {"f32", ConstTensor(f32.data(), DType::kF32, {n})},
                     {"f16", ConstTensor(f16.data(), DType::kF16, {n})},
                     {"bf16", ConstTensor(bf16.data(), DType::kBF16, {n})}},
                    {});
  const SafetensorsReader reader(path("a"));
  std::vector<float> got(static_cast<std::size_t>(n));
  std::vector<double> wide(static_cast<std::size_t>(n));
  const auto check = [&](const char* name, auto expected) {
    reader.read_f32(*reader.find(name), got.data());
    reader.read_f64(*reader.find(name), wide.data());
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i], static_cast<float>(expected(i))) << name << " " << i;
      ASSERT_EQ(wide[i], static_cast<double>(expected(i))) << name << " " << i;
    }
  };
  check("f64", [&](std::size_t i) { return f64[i]; });
  check("f32", [&](std::size_t i) { return f32[i]; });
  check("f16", [&](std::size_t i) { return to_float(f16[i]); });
  check("bf16", [&](std::size_t i) { return to_float(bf16[i]); });
}

TEST_F(Formats, TypesOfOtherWritersAreListedButNotConverted) {
  const std::string header = R"({"bool":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]},)"
                             R"("short":{"dtype":"I16","shape":[2],"data_offsets":[3,7]},)"
                             R"("f8":{"dtype":"F8_E4M3","shape":[2,2],"data_offsets":[7,11]},)"
                             R"("f4":{"dtype":"F4","shape":[3,2],"data_offsets":[11,14]},)"
                             R"("new":{"dtype":"Q9_Z","shape":[7],"data_offsets":[14,16]}})";
  const SafetensorsReader reader(put_header(header, 16));
  ASSERT_EQ(reader.tensors().size(), 5u);
  EXPECT_EQ(reader.find("short")->type, "I16");
  EXPECT_EQ(reader.find("new")->type, "Q9_Z");
  EXPECT_FALSE(reader.find("new")->dtype.has_value());
  std::uint8_t raw[4] = {};
  reader.read(*reader.find("f8"), raw);
  EXPECT_EQ(raw[3], 1);
  float value[8];
  for (const char* name : {"bool", "short", "f8", "f4", "new"}) {
    expect_error(ErrorKind::kBadFile, name, [&] { reader.read_f32(*reader.find(name), value); });
  }
}

TEST_F(Formats, HarmlessDifferencesOfWritersAreRead) {
  // White space around the header, members in another order or unknown, tensors out of order, null
  // metadata, data at odd addresses.
  const std::string header =
      " \n{\"b\":{\"data_offsets\":[1,5],\"shape\":[1],\"note\":{\"x\":[1]},\"dtype\":\"F32\"},"
      "\"__metadata__\":null,"
      "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}   \n";
  const SafetensorsReader reader(put_header(header, 5));
  ASSERT_EQ(reader.tensors().size(), 2u);
  EXPECT_EQ(reader.tensors()[0].name, "a");
  EXPECT_EQ(reader.tensors()[1].bytes, 4u);
  EXPECT_TRUE(reader.metadata().empty());
  EXPECT_TRUE(SafetensorsReader(put_header("{}", 0)).tensors().empty());
}

TEST_F(Formats, DamagedFramesAreRefused) {
  expect_bad(put(""), "0 bytes");
  expect_bad(put("short"), "5 bytes");
  expect_bad(put("In the beginning"),
             "not a safetensors file, but text that begins with 'In the b'");
  expect_bad(put("{\n  \"a\": 1}"), "text that begins with '{\\x0a  ");
  expect_bad(put(std::string("\x10\0\0\0\0\0\0\0", 8)), "cut off");
  expect_bad(put(std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10)), "the limit is");
  expect_bad(put(std::string("\x01\xe1\xf5\x05\0\0\0\0", 8)), "the limit is");  // 100,000,001
  expect_bad(put(std::string("\x00\xe1\xf5\x05\0\0\0\0", 8)), "cut off");       // 100,000,000
  expect_bad(put_header("", 0), "not JSON");
  expect_bad(put_header("[]", 0), "no JSON object");
  expect_bad(put_header("{\"a\":", 0), "not JSON");
  expect_bad(put_header("{} x", 0), "not JSON");
  expect_bad(put_header("{\"\xff\":{}}", 0), "not JSON");  // not UTF-8
  expect_bad(put_header(std::string(1000000, '['), 0), "nests deeper");
  expect_bad(put_header("{\"a\":" + std::string(70, '[') + std::string(70, ']') + "}", 0),
             "nests deeper");
}

TEST_F(Formats, DamagedHeadersAreRefused) {
  const auto one = [&](const std::string& tensor, std::size_t bytes, const std::string& part) {
    SCOPED_TRACE(tensor);
    expect_bad(put_header("{\"w\":" + tensor + "}", bytes), part);
    expect_bad(path("f.safetensors"), "'w'");
  };
  one("3", 0, "not an object");
  one(R"({"shape":[1],"data_offsets":[0,4]})", 4, "no 'dtype'");
  one(R"({"dtype":"F32","data_offsets":[0,4]})", 4, "no 'shape'");
  one(R"({"dtype":"F32","shape":[1]})", 4, "no 'data_offsets'");
  one(R"({"dtype":1,"shape":[1],"data_offsets":[0,4]})", 4, "dtype");
  one(R"({"dtype":"F32","shape":{"0":1},"data_offsets":[0,4]})", 4, "shape");
  one(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})", 4, "-1");
  one(R"({"dtype":"F32","shape":[1.0],"data_offsets":[0,4]})", 4, "1.0");
  one(R"({"dtype":"F32","shape":["1"],"data_offsets":[0,4]})", 4, "whole number");
  one(R"({"dtype":"F32","shape":[1],"data_offsets":[0]})", 4, "data_offsets");
  one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4,8]})", 4, "data_offsets");
  one(R"({"dtype":"F32","shape":[1],"data_offsets":[-4,0]})", 4, "data_offsets");
  one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4e0]})", 4, "data_offsets");
  one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})", 4, "bytes 4 to 0");
  one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})", 3, "cut off");
  one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]})", 4, "cut off");
  one(R"({"dtype":"F32","shape":[1],"data_offsets":[18446744073709551612,18446744073709551615]})",
      4, "cut off");
  one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})", 4, "does not fit");
  one(R"({"dtype":"F64","shape":[1],"data_offsets":[0,4]})", 4, "does not fit");
  one(R"({"dtype":"F4","shape":[1],"data_offsets":[0,1]})", 1, "does not fit");
  // Products that wrap to something small.
  one(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]})", 0,
      "more elements");
  one(R"({"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,0]})", 0, "more elements");
  one(R"({"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]})", 0, "does not fit");
  one(R"({"dtype":"Q9","shape":[4294967296,4294967296],"data_offsets":[0,0]})", 0, "more elements");
  // Holes, before and after.
  one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})", 8, "4 bytes before");
  expect_bad(put_header(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 5),
             "last 1 bytes");
}

TEST_F(Formats, OverlapsDuplicatesAndMetadataAreChecked) {
  expect_bad(put_header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                        R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
                        12),
             "'b' overlap");
  expect_bad(put_header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                        R"("b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
                        8),
             "overlap");
  expect_bad(put_header(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                        R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                        1),
             "'a' stands twice");
  expect_bad(put_header(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
             "'dtype' stands twice");
  expect_bad(put_header(R"({"__metadata__":{"n":3}})", 0), "'n'");
  expect_bad(put_header(R"({"__metadata__":["n"]})", 0), "__metadata__");
  // Control characters in a name must not reach the terminal.
  try {
    SafetensorsReader reader(put_header(R"({"\u001b[2J":{}})", 0));
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()).find('\x1b'), std::string::npos);
  }
}

TEST_F(Formats, OnlyRegularFilesAreOpened) {
  expect_error(ErrorKind::kIo, "No such file", [&] { SafetensorsReader r(path("missing")); });
  expect_bad(folder_.path(), "a folder");
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  expect_bad(path("pipe"), "a pipe or device");  // and does not wait for a writer
  expect_bad("/dev/zero", "a pipe or device");
}

TEST_F(Formats, AFileThatShrinksWhileOpenIsAnError) {
  const std::vector<float> values(100000, 1.0f);
  write_safetensors(path("a"), {{"w", ConstTensor(values.data(), DType::kF32, {100000})}}, {});
  const SafetensorsReader reader(path("a"));
  std::vector<float> back(values.size());
  reader.read_f32(*reader.find("w"), back.data());
  EXPECT_EQ(back, values);
  fs::resize_file(path("a"), 5000);
  expect_error(ErrorKind::kBadFile, "cut off while",
               [&] { reader.read_f32(*reader.find("w"), back.data()); });
  expect_error(ErrorKind::kBadFile, "cut off while",
               [&] { reader.read(*reader.find("w"), back.data()); });
  std::vector<double> wide(values.size());
  expect_error(ErrorKind::kBadFile, "cut off while",
               [&] { reader.read_f64(*reader.find("w"), wide.data()); });
}

TEST_F(Formats, EveryTruncationOfAFileIsRefused) {
  const std::vector<float> values = {1, 2, 3};
  write_safetensors(path("a"), {{"w", ConstTensor(values.data(), DType::kF32, {3})}},
                    {{"key", "value"}});
  const std::string whole = read_file(path("a"));
  for (std::size_t n = 0; n < whole.size(); ++n) {
    EXPECT_THROW(SafetensorsReader(put(whole.substr(0, n))), Error) << n;
  }
  EXPECT_THROW(SafetensorsReader(put(whole + "x")), Error);
  EXPECT_NO_THROW(SafetensorsReader(put(whole)));
}

TEST_F(Formats, TheWriterRefusesWhatTheReaderWould) {
  const std::vector<float> values(6);
  const ConstTensor dense(values.data(), DType::kF32, {6});
  const auto write = [&](const std::string& name, const ConstTensor& tensor,
                         const std::string& part) {
    expect_error(ErrorKind::kInvalidArgument, part, [&] {
      write_safetensors(path("a"), {{name, tensor}}, {});
    });
  };
  write("__metadata__", dense, "keeps this name");
  write("w", ConstTensor(), "absent");
  write("\xff", dense, "UTF-8");
  ConstTensor strided(values.data(), DType::kF32, {2, 2});
  strided.stride[0] = 3;
  write("w", strided, "not dense");
  expect_error(ErrorKind::kInvalidArgument, "two tensors", [&] {
    write_safetensors(path("a"), {{"w", dense}, {"w", dense}}, {});
  });
  EXPECT_TRUE(names().empty());
}

TEST_F(Formats, JsonLimits) {
  EXPECT_EQ(parse_json(R"({"a":[1,{"a":2}],"b":{"a":3}})", "x")["b"]["a"], 3);
  const auto nested = [](std::size_t n) { return std::string(n, '[') + std::string(n, ']'); };
  EXPECT_NO_THROW(parse_json(nested(64), "x"));
  expect_error(ErrorKind::kBadFile, "x: JSON nests", [&] { parse_json(nested(65), "x"); });
  expect_error(ErrorKind::kBadFile, "x: not JSON: parse error at line 2",
               [] { parse_json("{\n\"a\" 1}", "x"); });
  expect_error(ErrorKind::kBadFile, "'k' stands twice",
               [] { parse_json(R"([{"k":1},{"k":1,"k":2}])", "x"); });
  expect_error(ErrorKind::kBadFile, "not JSON", [] { parse_json("\"\xc3(\"", "x"); });
  expect_error(ErrorKind::kBadFile, "not JSON", [] { parse_json("1e999", "x"); });
  expect_error(ErrorKind::kBadFile, "not JSON", [] { parse_json("", "x"); });
}

// Work in proportion to the text: with the square of its objects this would take hours.
TEST_F(Formats, JsonOfManyObjects) {
  std::string text = "{";
  constexpr int kMany = 300'000;
  for (int i = 0; i < kMany; ++i)
    text += fmt::format(R"({}"t{}":{{"a":[]}})", i == 0 ? "" : ",", i);
  EXPECT_EQ(parse_json(text + "}", "x").size(), kMany);
}

TEST_F(Formats, ReadFileTakesPipesAndHeedsItsLimit) {
  const std::string content(300000, 'a');
  put(content, "whole");
  EXPECT_EQ(read_file(path("whole")), content);
  EXPECT_EQ(read_file(path("whole"), content.size()), content);
  expect_error(ErrorKind::kBadFile, "larger than",
               [&] { read_file(path("whole"), content.size() - 1); });
  expect_error(ErrorKind::kBadFile, "larger than", [] { read_file("/dev/zero", 1 << 20); });
  expect_error(ErrorKind::kIo, "directory", [&] { read_file(folder_.path()); });
  expect_error(ErrorKind::kIo, "No such file", [&] { read_file(path("missing")); });
  EXPECT_NE(read_file("/proc/self/status").find("Name:"), std::string::npos);  // says size 0
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  std::jthread writer([&] { std::ofstream(path("pipe")) << content; });
  EXPECT_EQ(read_file(path("pipe")), content);
}

TEST_F(Formats, AtomicFileAppearsOnCommitOnly) {
  put("old", "f");
  fs::permissions(path("f"), fs::perms::owner_read | fs::perms::owner_write);
  {
    AtomicFile file(path("f"));
    file.write("new");
    EXPECT_EQ(read_file(path("f")), "old");
  }
  EXPECT_EQ(read_file(path("f")), "old");
  EXPECT_EQ(names(), std::vector<std::string>{"f"});
  {
    AtomicFile file(path("f"));
    file.write("new");
    file.commit();
  }
  EXPECT_EQ(read_file(path("f")), "new");
  EXPECT_EQ(names(), std::vector<std::string>{"f"});
  EXPECT_EQ(fs::status(path("f")).permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

TEST_F(Formats, AtomicFileFollowsLinksAndWritesDevicesDirectly) {
  put("old", "target");
  fs::create_symlink("target", path("link"));
  write_file(path("link"), "new");
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(read_file(path("target")), "new");
  write_file("/dev/null", "gone");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  expect_error(ErrorKind::kIo, "directory", [&] { write_file(folder_.path(), "x"); });
  expect_error(ErrorKind::kIo, "No such file", [&] { write_file(path("no/where"), "x"); });
}

TEST_F(Formats, AtomicFileFollowsLinksToWhatIsNotThere) {
  fs::create_directory(path("far"));
  fs::create_symlink("far/b", path("a"));  // from the folder of the link
  fs::create_symlink(path("far/c"), path("far/b"));
  EXPECT_EQ(target_of(path("a")), path("far/c"));
  EXPECT_EQ(target_of(path("plain")), path("plain"));
  for (const char* content : {"new", "newer"}) {
    write_file(path("a"), content);
    EXPECT_TRUE(fs::is_symlink(path("a")) && fs::is_symlink(path("far/b")));
    EXPECT_EQ(read_file(path("far/c")), content);
  }
  // Temporaries lie where the file does.
  put("", "far/c.1-0.tmp");
  remove_temporaries(path("a"));
  EXPECT_FALSE(fs::exists(path("far/c.1-0.tmp")));
  fs::remove(path("far/c"));
  fs::create_symlink("none/d", path("astray"));
  expect_error(ErrorKind::kIo, "No such file", [&] { AtomicFile file(path("astray")); });
  fs::create_symlink("round", path("circle"));
  fs::create_symlink("circle", path("round"));
  expect_error(ErrorKind::kIo, path("circle"), [&] { AtomicFile file(path("circle")); });
  EXPECT_TRUE(fs::is_symlink(path("astray")) && fs::is_symlink(path("circle")));
  // Folders, too.
  fs::create_symlink("new/folder", path("to_folder"));
  make_folder(path("to_folder"));
  make_folder(path("to_folder"));
  EXPECT_TRUE(fs::is_directory(path("new/folder")) && fs::is_symlink(path("to_folder")));
  expect_error(ErrorKind::kIo, "cannot make the folder", [&] { make_folder(path("circle")); });
}

// Circles and what may not be looked at are there: whoever opens them says what is wrong.
TEST_F(Formats, IsThere) {
  EXPECT_FALSE(is_there(path("none")));
  put("", "file");
  fs::create_symlink("file", path("link"));
  fs::create_symlink("none", path("dangling"));
  fs::create_symlink("round", path("circle"));
  fs::create_symlink("circle", path("round"));
  EXPECT_TRUE(is_there(path("file")));
  EXPECT_TRUE(is_there(path("link")));
  EXPECT_TRUE(is_there(path("circle")));
  EXPECT_TRUE(is_there(folder_.path()));
  EXPECT_FALSE(is_there(path("dangling")));
  EXPECT_FALSE(is_there(path("file/below")));
}

TEST_F(Formats, AFullDiskLeavesWhatWasThere) {
  expect_error(ErrorKind::kIo, "No space left", [] { write_file("/dev/full", "x"); });

  // A limit on file size stands in for a full disk: the write that crosses it fails in the middle.
  put("old", "f");
  ASSERT_NE(::signal(SIGXFSZ, SIG_IGN), SIG_ERR);
  struct rlimit before;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit tight = before;
  tight.rlim_cur = 10000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &tight), 0);
  const std::vector<float> values(100000);
  expect_error(ErrorKind::kIo, path("f"), [&] {
    write_safetensors(path("f"), {{"w", ConstTensor(values.data(), DType::kF32, {100000})}}, {});
  });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(read_file(path("f")), "old");
  EXPECT_EQ(names(), std::vector<std::string>{"f"});
}

TEST_F(Formats, MakeFolder) {
  make_folder(path("a/b/c"));
  EXPECT_TRUE(fs::is_directory(path("a/b/c")));
  EXPECT_NO_THROW(make_folder(path("a/b/c")));
  put("x", "file");
  expect_error(ErrorKind::kIo, "cannot make the folder", [&] { make_folder(path("file")); });
  expect_error(ErrorKind::kIo, "cannot make the folder", [&] { make_folder(path("file/b")); });
}

}  // namespace
}  // namespace ouzel
