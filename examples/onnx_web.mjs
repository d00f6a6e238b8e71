// An exported model in JavaScript: `npm install onnxruntime-web jpeg-js`, then
// `node onnx_web.mjs model.onnx CLASSES.json PICTURE.jpg ...`; in a browser the pixels come from a
// canvas (getImageData) instead of jpeg-js. CLASSES.json is a list of names, as in model.json.
import { readFile } from "node:fs/promises";
import * as ort from "onnxruntime-web";
import jpeg from "jpeg-js";

const [, , modelFile, classesFile, ...pictures] = process.argv;
const classes = JSON.parse(await readFile(classesFile, "utf8"));
const session = await ort.InferenceSession.create(await readFile(modelFile));

// RGBA rows, as a canvas and jpeg-js give them, to uint8 [1, 3, H, W]; any size will do
function tensor({ data, width, height }) {
  const pixels = new Uint8Array(3 * width * height);
  for (let k = 0; k < width * height; k++)
    for (let c = 0; c < 3; c++) pixels[c * width * height + k] = data[4 * k + c];
  return new ort.Tensor("uint8", pixels, [1, 3, height, width]);
}

for (const file of pictures) {
  const image = jpeg.decode(await readFile(file), { useTArray: true });
  const answer = await session.run({ images: tensor(image) });
  const probabilities = Array.from(answer.probabilities.data);
  const confidence = Math.max(...probabilities);
  const set = classes.filter((_, k) => answer.set.data[k]);
  const label = classes[probabilities.indexOf(confidence)];
  console.log(JSON.stringify({ file, label, confidence, set, sure: Boolean(answer.sure.data[0]) }));
}
