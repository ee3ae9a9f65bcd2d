meta:
  id: fpformat_segment
  title: Segment of an fpformat 1.0 checkpoint
  file-extension: fps
  license: Apache-2.0
  ks-version: 0.11
  endian: le
  encoding: UTF-8

doc: |
  Layout of one segment: header, index directory, all tables, state tree, footer. Informative: the
  normative text is fpformat-1.0.rst. Checksums, placement and the rules between records are not
  described here. Whatever is compressed (feature zstd) is given as stored bytes.

seq:
  - id: header
    type: header

instances:
  block_nbytes:
    value: 1 << header.log2_align
  footer:
    pos: _io.size - 128
    type: footer
  index:
    pos: footer.index_offset
    size: footer.index_nbytes
    type: index
  tensors:
    value: index.entries[0].body.as<tensor_table>.records
  extents:
    value: index.entries[1].body.as<extent_table>.records
  dims:
    value: index.entries[2].body.as<u64_table>.records
  names:
    value: index.entries[3].body.as<names_table>.names
  crc32c:
    value: index.entries[4].body.as<u32_table>.records
  objects:
    value: index.entries[5].body.as<object_table>.records
    if: index.table_count > 5 and index.entries[5].kind == 6
  element_nbytes:
    value: '[0, 1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 1, 1, 1, 1, 1, 1, 4, 8, 16]'
    doc: Size of an element by the code of the data type.

types:
  header:
    seq:
      - id: magic
        contents: [0x89, 0x46, 0x50, 0x53, 0x0d, 0x0a, 0x1a, 0x0a]
      - id: major
        type: u2
        valid: 1
      - id: minor
        type: u2
      - id: header_nbytes
        type: u4
        valid: 128
      - id: incompat
        type: u8
      - id: ro_compat
        type: u8
      - id: compat
        type: u8
      - id: byte_order
        type: u2
        valid: 0x0102
      - id: checksum_algorithm
        type: u2
        valid: 1
      - id: ordinal
        type: u4
      - id: save_id
        size: 16
      - id: log2_align
        type: u1
        valid:
          min: 12
          max: 21
      - id: log2_tensor_align
        type: u1
        valid:
          min: 6
          max: 12
      - id: log2_piece
        type: u1
        valid:
          min: 14
          max: 20
      - id: zero
        size: 57
      - id: crc
        type: u4

  footer:
    seq:
      - id: index_offset
        type: u8
      - id: index_nbytes
        type: u8
      - id: index_sha256
        size: 32
      - id: save_id
        size: 16
      - id: segment_nbytes
        type: u8
      - id: ordinal
        type: u4
      - id: zero
        size: 40
      - id: crc
        type: u4
      - id: end_magic
        contents: [0x89, 0x46, 0x50, 0x45, 0x0d, 0x0a, 0x1a, 0x0a]

  index:
    seq:
      - id: magic
        contents: FPSINDEX
      - id: table_count
        type: u4
      - id: entry_nbytes
        type: u4
        valid: 64
      - id: index_nbytes
        type: u8
      - id: zero
        type: u8
        valid: 0
      - id: entries
        type: entry
        repeat: expr
        repeat-expr: table_count

  entry:
    seq:
      - id: kind
        type: u4
      - id: flags
        type: u4
        valid:
          max: 1
      - id: record_nbytes
        type: u4
      - id: zero
        type: u4
        valid: 0
      - id: count
        type: u8
      - id: offset
        type: u8
      - id: sha256
        size: 32
    instances:
      body:
        pos: offset
        size: count * record_nbytes
        type:
          switch-on: kind
          cases:
            1: tensor_table
            2: extent_table
            3: u64_table
            4: names_table
            5: u32_table
            6: object_table
            7: object_ranks_table
            8: u32_table

  tensor_table:
    seq:
      - id: records
        type: tensor
        repeat: eos

  tensor:
    seq:
      - id: nbytes
        type: u8
      - id: name_offset
        type: u4
      - id: scope
        type: u4
      - id: dims_index
        type: u4
      - id: target
        type: u4
      - id: name_nbytes
        type: u2
      - id: dtype
        type: u2
      - id: ndim
        type: u1
      - id: flags
        type: u1
      - id: zero
        type: u2
        valid: 0
    instances:
      is_global:
        value: scope == 0xffffffff
      has_target:
        value: target != 0xffffffff
      is_view:
        value: (flags & 1) != 0
      is_hidden:
        value: (flags & 2) != 0

  extent_table:
    seq:
      - id: records
        type: extent
        repeat: eos

  extent:
    seq:
      - id: offset
        type: u8
      - id: stored_nbytes
        type: u8
      - id: nbytes
        type: u8
      - id: shard_offset
        type: u8
      - id: owner
        type: u4
      - id: dims_index
        type: u4
      - id: piece_first
        type: u4
      - id: codec
        type: u1
      - id: owner_kind
        type: u1
        valid:
          max: 1
      - id: zero
        type: u2
        valid: 0
    instances:
      has_box:
        value: dims_index != 0xffffffff
      stored:
        io: _root._io
        pos: offset
        size: stored_nbytes

  u64_table:
    seq:
      - id: records
        type: u8
        repeat: eos

  u32_table:
    seq:
      - id: records
        type: u4
        repeat: eos

  names_table:
    seq:
      - id: names
        type: strz
        repeat: eos

  object_table:
    seq:
      - id: records
        type: object
        repeat: eos

  object:
    seq:
      - id: name_offset
        type: u4
      - id: scope
        type: u4
      - id: extent
        type: u4
      - id: name_nbytes
        type: u2
      - id: kind
        type: u2
        valid:
          min: 1
          max: 2
    instances:
      tree:
        io: _root._io
        pos: _root.extents[extent].offset
        size: _root.extents[extent].stored_nbytes
        type: tree
        if: kind == 1 and _root.extents[extent].codec == 0

  object_ranks_table:
    seq:
      - id: records
        type: object_ranks
        repeat: eos

  object_ranks:
    seq:
      - id: object
        type: u4
      - id: start
        type: u4
      - id: stop
        type: u4

  tree:
    seq:
      - id: root
        type: node
      - id: rest
        size-eos: true
        valid: '[].as<bytes>'

  node:
    seq:
      - id: tag
        type: u1
        enum: tag
      - id: payload
        type:
          switch-on: tag
          cases:
            'tag::none': nothing
            'tag::bool_false': nothing
            'tag::bool_true': nothing
            'tag::int': s8
            'tag::big_int': octets
            'tag::float': f8
            'tag::complex': complex
            'tag::str': text
            'tag::bytes': octets
            'tag::list': nodes
            'tag::tuple': nodes
            'tag::dict': pairs
            'tag::tensor': u4
            'tag::parameter': parameter
            'tag::numpy_array': u4
            'tag::numpy_scalar': scalar
            'tag::torch_size': sizes
            'tag::torch_dtype': u2
            'tag::torch_device': text
            'tag::ordered_dict': ordered_dict
            'tag::flattened': flattened
            'tag::numpy_dtype': u2
            'tag::counter': pairs

  nothing: {}

  octets:
    seq:
      - id: nbytes
        type: u4
      - id: octets
        size: nbytes

  text:
    seq:
      - id: nbytes
        type: u4
      - id: text
        type: str
        size: nbytes

  complex:
    seq:
      - id: real
        type: f8
      - id: imag
        type: f8

  nodes:
    seq:
      - id: count
        type: u4
      - id: nodes
        type: node
        repeat: expr
        repeat-expr: count

  pairs:
    seq:
      - id: count
        type: u4
      - id: pairs
        type: pair
        repeat: expr
        repeat-expr: count

  pair:
    seq:
      - id: key
        type: node
      - id: value
        type: node

  parameter:
    seq:
      - id: index
        type: u4
      - id: requires_grad
        type: u1
        valid:
          max: 1

  scalar:
    seq:
      - id: dtype
        type: u2
        valid:
          min: 1
          max: 22
      - id: element
        size: _root.element_nbytes[dtype]

  sizes:
    seq:
      - id: count
        type: u4
      - id: sizes
        type: s8
        repeat: expr
        repeat-expr: count

  ordered_dict:
    seq:
      - id: items
        type: pairs
      - id: attributes
        type: node
        doc: always a dict

  flattened:
    seq:
      - id: label
        type: text
      - id: context
        type: node
      - id: parts
        type: pairs
        doc: the keys are strings

enums:
  tag:
    0: none
    1: bool_false
    2: bool_true
    3: int
    4: big_int
    5: float
    6: complex
    7: str
    8: bytes
    9: list
    10: tuple
    11: dict
    12: tensor
    13: parameter
    14: numpy_array
    15: numpy_scalar
    16: torch_size
    17: torch_dtype
    18: torch_device
    19: ordered_dict
    20: flattened
    21: numpy_dtype
    22: counter
