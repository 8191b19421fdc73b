// Decodes token ids greedily with llama.cpp, for studies/llamacpp.py:
//
//     node studies/llamacpp.mjs FOLDER MODEL.gguf THREADS CONTEXT
//
// FOLDER is where npm installed node-llama-cpp. Each line of standard input is a job {"ids", "limit", "stop"}; the
// answer is a line {"tokens", "seconds", "forward_seconds"}, from an empty cache. `seconds` is wall time from the
// prompt's ids to the last token's; `forward_seconds` is the part of it that llama.cpp counts for its forwards. The
// first line says which of llama.cpp's libraries computes.
import fs from "node:fs";
import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const [folder, modelPath, threads, contextSize] = process.argv.slice(2);
const entry = path.join(path.resolve(folder), "node_modules/node-llama-cpp/dist/index.js");
const {getLlama} = await import(pathToFileURL(entry));
let milliseconds = 0;
const logger = (level, message) => {
    for (const found of message.matchAll(/eval time =\s*([\d.]+) ms/g)) milliseconds += Number(found[1]);
    if (level === "error" || level === "fatal") console.error(message);
};
const llama = await getLlama({gpu: false, build: "never", maxThreads: Number(threads), logLevel: "info", logger});
const model = await llama.loadModel({modelPath, gpuLayers: 0});
const context = await model.createContext({
    contextSize: Number(contextSize), threads: Number(threads), sequences: 1, performanceTracking: true
});
const sequence = context.getSequence();

const maps = fs.existsSync("/proc/self/maps") ? fs.readFileSync("/proc/self/maps", "utf8") : "";
const kernel = maps.match(/libggml-cpu[^/\s]*/)?.[0] ?? null;
console.log(JSON.stringify({kernel, threads: context.currentThreads}));

for await (const line of readline.createInterface({input: process.stdin})) {
    const {ids, limit, stop} = JSON.parse(line);
    const ends = new Set(stop), tokens = [];
    await sequence.clearHistory();
    const started = performance.now();
    for await (const token of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true})) {
        tokens.push(token);
        if (tokens.length >= limit || ends.has(token)) break;
    }
    const seconds = (performance.now() - started) / 1000;
    milliseconds = 0;
    await context.printTimings(); // to the logger
    console.log(JSON.stringify({tokens, seconds, forward_seconds: milliseconds / 1000}));
}
process.exit(0);
