# Finds sentencepiece: target SentencePiece::SentencePiece. Not by pkg-config: Ubuntu's file asks for protobuf's headers, which nothing needs.
find_path(SentencePiece_INCLUDE_DIR sentencepiece_trainer.h)
find_library(SentencePiece_LIBRARY sentencepiece)
find_library(SentencePiece_train_LIBRARY sentencepiece_train)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(SentencePiece REQUIRED_VARS SentencePiece_LIBRARY SentencePiece_train_LIBRARY SentencePiece_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "Debian's package is libsentencepiece-dev (`make setup` installs it).")
if(SentencePiece_FOUND AND NOT TARGET SentencePiece::SentencePiece)
  add_library(SentencePiece::SentencePiece INTERFACE IMPORTED)
  set_target_properties(SentencePiece::SentencePiece PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${SentencePiece_INCLUDE_DIR}"
    INTERFACE_LINK_LIBRARIES "${SentencePiece_LIBRARY};${SentencePiece_train_LIBRARY}")
endif()
