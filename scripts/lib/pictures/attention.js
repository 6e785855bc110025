// The attention page: picks a layer and a head, and shows the map and the numbers of that head. `root` is the .attention
// element, `data` what attention_page.py embeds.
function attentionPage(root, data) {
    const find = name => root.querySelector("." + name);
    const state = {series: 0, layer: 0, head: 0, codes: null};
    const canvas = find("canvas"), reading = find("reading");
    const current = () => data.series[state.series];

    // ---- numbers

    const plain = x => x === null || x === undefined ? "–" : x === 0 ? "0" :
        Math.abs(x) >= 1e-4 && Math.abs(x) < 1e6 ? String(+x.toPrecision(4)) : x.toExponential(2);

    // Decodes what encode() in attention.py encodes.
    function weight(code) {
        const s = current(), top = s.tops[state.layer][state.head], steps = s.signed ? 127 : 254;
        const level = code - (s.signed ? 128 : 1);
        return code === 0 || level === 0 ? 0 : Math.sign(level) * top * 10 ** (data.decades * (Math.abs(level) / steps - 1));
    }

    // The weight behind a code, in words. Level 0 stands for 0 and for what rounds to less than the first level.
    function reading_of(code) {
        const s = current(), top = s.tops[state.layer][state.head], steps = s.signed ? 127 : 254;
        if (code === 0) return "not visible";
        if (top === 0) return "no weight";
        const kind = s.cell > 1 ? "mean weight " : "weight ";
        return kind + (weight(code) === 0 ? (s.signed ? "within ±" : "below ") + plain(top * 10 ** (data.decades * (0.5 / steps - 1))) : plain(weight(code)));
    }

    // The index of a color, from 1 to 255.
    function shade(code) {
        const s = current();
        if (!find("linear").selected || code === 0) return code;
        const top = s.tops[state.layer][state.head], part = top > 0 ? weight(code) / top : 0;
        return s.signed ? Math.round(128 + 127 * part) : Math.round(1 + 254 * part);
    }

    // ---- the map

    function paint() {
        const s = current(), context = canvas.getContext("2d"), side = s.side;
        canvas.width = canvas.height = side;
        if (!state.codes) return;
        const image = context.createImageData(side, side), colors = data.palettes[s.signed ? "signed" : "plain"];
        for (let i = 0; i < side * side; i++) {
            const code = state.codes[i], at = 6 * shade(code), color = parseInt(colors.slice(at, at + 6), 16);
            image.data.set([color >> 16, color >> 8 & 255, color & 255, code ? 255 : 0], 4 * i);
        }
        context.putImageData(image, 0, 0);
    }

    function load() {
        const s = current(), png = s.maps && s.maps[state.layer][state.head], wanted = {...state};
        state.codes = null;
        paint();
        if (!png) return;
        const image = new Image();
        image.onload = () => {
            if (wanted.series !== state.series || wanted.layer !== state.layer || wanted.head !== state.head) return;
            const scratch = document.createElement("canvas");
            scratch.width = scratch.height = s.side;
            const context = scratch.getContext("2d", {willReadFrequently: true});
            context.drawImage(image, 0, 0);
            const pixels = context.getImageData(0, 0, s.side, s.side).data;
            state.codes = Uint8Array.from({length: s.side * s.side}, (_, i) => pixels[4 * i]);
            paint();
        };
        image.src = "data:image/png;base64," + png;
    }

    function range(s, cell) {
        const from = cell * s.cell, to = Math.min(from + s.cell, s.T) - 1;
        const words = s.tokens ? " “" + s.tokens.slice(from, to + 1).join("") + "”" : "";
        return (from === to ? String(from + 1) : `${from + 1}–${to + 1}`) + words;
    }

    function read(event) {
        const s = current(), box = canvas.getBoundingClientRect();
        const row = Math.floor((event.clientY - box.top) / box.height * s.side);
        const column = Math.floor((event.clientX - box.left) / box.width * s.side);
        if (!state.codes || row < 0 || column < 0 || row >= s.side || column >= s.side) return;
        const code = state.codes[row * s.side + column];
        reading.textContent = `query ${range(s, row)}, key ${range(s, column)}: ${reading_of(code)}`;
    }

    function scale() {
        const s = current(), bar = find("bar"), context = bar.getContext("2d"), top = s.tops ? s.tops[state.layer][state.head] : 0;
        const colors = data.palettes[s.signed ? "signed" : "plain"];
        bar.width = 255;
        bar.height = 1;
        for (let i = 1; i < 256; i++) {
            context.fillStyle = "#" + colors.slice(6 * i, 6 * i + 6);
            context.fillRect(i - 1, 0, 1, 1);
        }
        const least = find("linear").selected ? 0 : top / 10 ** data.decades;
        find("least").textContent = s.signed ? plain(-top) : (least ? "≤ " : "") + plain(least);
        find("most").textContent = plain(top);
    }

    // ---- the overview

    function overview() {
        const s = current(), grid = find("overview"), key = find("statistic").value;
        grid.replaceChildren();
        grid.style.gridTemplateColumns = `repeat(${s.heads}, minmax(0, 1fr))`;
        grid.style.maxWidth = `${Math.min(30, Math.max(8, 3 * s.heads))}rem`;
        const values = key === "map" ? [] : s.mean[key].flat().filter(x => x !== null);
        const least = Math.min(...values), most = Math.max(...values);
        for (let layer = 0; layer < s.layers; layer++) {
            for (let head = 0; head < s.heads; head++) {
                const button = document.createElement("button");
                button.type = "button";
                button.tabIndex = -1;
                button.dataset.at = `${layer},${head}`;
                button.onclick = () => pick({layer, head});
                button.title = `layer ${layer}, head ${head}`;
                if (key === "map") {
                    if (s.sheet) {
                        button.style.backgroundImage = `url(data:image/png;base64,${s.sheet})`;
                        button.style.backgroundSize = `${100 * s.heads}% ${100 * s.layers}%`;
                        button.style.backgroundPosition = `${s.heads > 1 ? 100 * head / (s.heads - 1) : 0}% ${s.layers > 1 ? 100 * layer / (s.layers - 1) : 0}%`;
                    }
                } else {
                    const x = s.mean[key][layer][head], at = 6 * (1 + Math.round(254 * (most > least ? (x - least) / (most - least) : 0)));
                    if (x !== null) button.style.backgroundColor = "#" + data.palettes.plain.slice(at, at + 6);
                    button.title += `: ${plain(x)}`;
                }
                button.setAttribute("aria-label", button.title);
                grid.append(button);
            }
            const every = Math.ceil(s.layers / 16);
            if (layer % every === 0) {
                const name = document.createElement("span");
                name.className = "layer";
                name.textContent = layer;
                name.style.top = `${100 * (layer + 0.5) / s.layers}%`;
                grid.append(name);
            }
        }
        find("extent").textContent = key === "map" ? "rows: layers, columns: heads, from 0" : `from ${plain(least)} (dark) to ${plain(most)} (bright); rows: layers`;
        mark();
    }

    function mark() {
        for (const button of find("overview").querySelectorAll("button"))
            button.setAttribute("aria-pressed", button.dataset.at === `${state.layer},${state.head}`);
    }

    // ---- the numbers beside the map

    function table() {
        const s = current(), body = find("numbers");
        body.replaceChildren();
        for (const [key, name] of data.statistics) {
            const row = body.insertRow();
            row.insertCell().textContent = name;
            for (const part of ["first", "mean", "with_end"]) row.insertCell().textContent = s[part] ? plain(s[part][key][state.layer][state.head]) : "–";
        }
        for (const [key, name] of data.residual) {
            const row = body.insertRow();
            row.insertCell().textContent = name;
            for (const part of ["first", "mean", "with_end"]) row.insertCell().textContent = s[part] ? plain(s[part][key][state.layer]) : "–";
        }
    }

    const svg = (name, keys, text) => {
        const element = document.createElementNS("http://www.w3.org/2000/svg", name);
        for (const key in keys) element.setAttribute(key, keys[key]);
        if (text !== undefined) element.textContent = text;
        return element;
    };

    // Bars or a line over the powers of two.
    function chart(where, title, values, line, reference) {
        const W = 260, H = 140, left = 34, bottom = 22, known = values.filter(x => x !== null);
        const most = Math.max(...known, ...(reference || []), 1e-9), step = (W - left - 6) / values.length;
        const x = i => left + (i + 0.5) * step, y = v => H - bottom - v / most * (H - bottom - 10);
        const out = svg("svg", {viewBox: `0 0 ${W} ${H}`, width: "100%", role: "img", "aria-label": title});
        for (const v of [0, most / 2, most]) {
            out.append(svg("line", {x1: left, x2: W, y1: y(v), y2: y(v), stroke: "var(--line)"}));
            out.append(svg("text", {x: left - 4, y: y(v) + 3, "font-size": 9, "text-anchor": "end", fill: "var(--muted)"}, plain(+v.toPrecision(2))));
        }
        values.forEach((v, i) => {
            if (i % Math.ceil(values.length / 6) === 0)
                out.append(svg("text", {x: x(i), y: H - 8, "font-size": 9, "text-anchor": "middle", fill: "var(--muted)"}, i === 0 ? line ? "1" : "0" : String(2 ** i)));
            if (!line && v !== null) out.append(svg("rect", {x: x(i) - step * 0.4, width: step * 0.8, y: y(v), height: y(0) - y(v), fill: "var(--accent)"}));
        });
        const path = (ys, style) => {
            const points = ys.map((v, i) => v === null ? null : `${x(i)},${y(v)}`).filter(p => p).join(" ");
            out.append(svg("polyline", {points, fill: "none", "stroke-width": 1.8, ...style}));
        };
        if (reference) path(reference, {stroke: "var(--muted)", "stroke-dasharray": "3 3", "stroke-width": 1});
        if (line) path(values, {stroke: "var(--accent)"});
        where.replaceChildren(out);
    }

    // ---- choosing

    function options(select, count, chosen) {
        select.replaceChildren(...Array.from({length: count}, (_, i) => new Option(String(i), String(i), false, i === chosen)));
    }

    function pick(change) {
        const before = state.series;
        Object.assign(state, change);
        const s = current();
        state.layer = Math.max(0, Math.min(s.layers - 1, state.layer));
        state.head = Math.max(0, Math.min(s.heads - 1, state.head));
        if (find("series")) find("series").value = state.series;
        options(find("layers"), s.layers, state.layer);
        options(find("heads"), s.heads, state.head);
        if (before !== state.series || !find("overview").firstChild) overview();
        mark();
        find("name").textContent = `${s.label}: layer ${state.layer}, head ${state.head}`;
        canvas.setAttribute("aria-label", `Attention map, ${find("name").textContent}`);
        const last = s.T, half = Math.round(last / 2);
        for (const ticks of root.querySelectorAll(".ticks")) ticks.replaceChildren(...[1, half, last].map(x => {
            const tick = document.createElement("span");
            tick.textContent = x.toLocaleString("en-US");
            return tick;
        }));
        find("cells").textContent = !s.maps ? "The file with this map is missing." : s.cell > 1 ?
            `The first prompt, ${s.T.toLocaleString("en-US")} tokens. Each cell is the mean weight over ${s.cell} × ${s.cell} positions.` :
            `The first prompt, ${s.T.toLocaleString("en-US")} tokens, a cell for each weight.`;
        reading.textContent = "Point at a cell for its weight.";
        load();
        scale();
        table();
        const n = s.entropy_by_n[state.layer][state.head];
        chart(find("entropy"), "Entropy by n", n, true, n.map((_, b) => Math.log(Math.sqrt(2 ** b * (2 ** (b + 1) - 1)))));
        chart(find("distance"), "Weight by distance", s.weight_by_distance[state.layer][state.head], false);
    }

    root.addEventListener("keydown", event => {
        const moves = {ArrowUp: {layer: state.layer - 1}, ArrowDown: {layer: state.layer + 1}, ArrowLeft: {head: state.head - 1}, ArrowRight: {head: state.head + 1}};
        if (event.target.tagName === "SELECT" || event.altKey || event.ctrlKey || event.metaKey || !moves[event.key]) return;
        event.preventDefault();
        pick(moves[event.key]);
    });
    canvas.addEventListener("pointermove", read);
    canvas.addEventListener("pointerdown", read);
    if (find("series")) find("series").onchange = event => pick({series: +event.target.value});
    find("layers").onchange = event => pick({layer: +event.target.value});
    find("heads").onchange = event => pick({head: +event.target.value});
    find("color").onchange = () => { paint(); scale(); };
    find("statistic").onchange = overview;
    root.hidden = false;
    pick({});
}
