// Text for messages: what a terminal would act on is made visible, and names find their neighbours.
#include "src/base/text.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace ouzel {
namespace {

TEST(Text, PrintableKeepsUtf8AndShowsTheRest) {
  EXPECT_EQ(printable("plain, \xc3\xa9\xe2\x82\xac\xf0\x9f\x90\xa6"), "plain, é€🐦");
  EXPECT_EQ(printable("\x1b[31mred\n"), "\\x1b[31mred\\x0a");
  EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b");                    // C1: CSI
  EXPECT_EQ(printable("\xff\xc3"), "\\xff\\xc3");                    // never UTF-8; cut off
  EXPECT_EQ(printable("\xc0\xaf"), "\\xc0\\xaf");                    // overlong
  EXPECT_EQ(printable("\xe0\x80\xaf"), "\\xe0\\x80\\xaf");           // overlong
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // beyond U+10FFFF
  EXPECT_EQ(printable(std::string(1000, 'x'), 10), "xxxxxxxxxx...");
}

TEST(Text, EditDistance) {
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("trian", "train"), 1u);  // a swap of neighbours is one edit
  EXPECT_EQ(edit_distance("same", "same"), 0u);
}

TEST(Text, NearestNames) {
  const std::vector<std::string> verbs = {"attend", "info", "train", "bench"};
  EXPECT_EQ(nearest("atend", verbs), "attend");
  EXPECT_EQ(nearest("ifno", verbs), "info");
  EXPECT_EQ(nearest("trian", verbs), "train");
  EXPECT_EQ(nearest("serve", verbs), std::nullopt);
  EXPECT_EQ(nearest("xy", verbs), std::nullopt);
  EXPECT_EQ(nearest(std::string(100000, 'a'), verbs), std::nullopt);
  EXPECT_EQ(did_you_mean("benhc", verbs), "; did you mean 'bench'?");
  EXPECT_EQ(did_you_mean("", verbs), "");
}

}  // namespace
}  // namespace ouzel
