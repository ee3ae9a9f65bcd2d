// Compile a Kaitai description, given as JSON on the standard input, to Python on the standard output.
const KaitaiStructCompiler = require("kaitai-struct-compiler");

let text = "";
process.stdin.on("data", (part) => { text += part; });
process.stdin.on("end", async () => {
  try {
    const files = await KaitaiStructCompiler.compile("python", JSON.parse(text), null, false);
    process.stdout.write(Object.values(files)[0]);
  } catch (error) {
    process.stderr.write(String(error.message || error) + "\n");
    process.exitCode = 1;
  }
});
